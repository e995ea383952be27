"""The adapters that ``ramify.vlm.attach`` knows, one file each; ``base.py`` says what an adapter is."""
