"""What the tests of Embed, Classify, Score and media ask, for both engines, and the independent answers."""
