"""What the toy model has read. A few paragraphs are enough for output that looks like English or JSON."""

from __future__ import annotations

from typing import Final

PARAGRAPHS: Final = (
    "The old house by the river was small, and every morning the light came in through the water. It was the "
    "hour that she liked best. The kettle was on, the bread was warm, and the letters of the day were still to "
    "come. ",
    "A good tool is one that does what it says. It takes what it is given, it tells what it did, and when it "
    "cannot do a thing it says so at once. That is all there is to it. ",
    "In the café on the corner the talk was of boats and of rain. The owner had a naïve hope that the season "
    "would be long. There was a cup of coffee ☕ on every table and a map of the coast on the wall. ",
    "The river is wide here, and the water is slow. Reeds stand in the shallows, and herons stand in the reeds. "
    "On the other bank there is a road that leads to the hills, and on the road there was a cart with an old "
    "horse and a load of stone for the new bridge. ",
    "To learn a trade is to learn its words. The mason has a word for each stone and the sailor has one for "
    "each rope. Words are the first of their tools, and they are the last to wear out. ",
    "The train was late again. Nobody on the platform was in a hurry, for it was a day of rest, and the sun was "
    "on the rails. A child counted the birds on the wire and lost count and began again. ",
    "It was a good day. The end.",
    "Yes.",
    "No, not at all.",
    '{"name": "Ada", "age": 36, "city": "London", "tags": ["tea", "rain", "sea"], "ok": true}',
    '{"id": 7, "title": "The old house", "price": 12.5, "sold": false, "owner": null, "size": {"x": 3, "y": 4}}',
    '{"answer": "yes", "score": 0.75, "items": [1, 2, 3, 10, 25], "note": "it was there"}',
    '{"kind": "boat", "color": "red", "count": 2, "parts": ["oar", "net", "sail"], "next": null}',
)
