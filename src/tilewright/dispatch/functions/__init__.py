"""tw.fuse: functions that a person wrote as operators."""
