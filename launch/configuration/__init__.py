"""The options of a run: names, defaults, files and presets."""
