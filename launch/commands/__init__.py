"""One module for each command that only looks at a run or a catalogue."""
