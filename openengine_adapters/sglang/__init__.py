"""The SGLang adapter. Importing this package does not import SGLang."""
