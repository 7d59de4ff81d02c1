"""From words to masks: which of an image's masks a text means."""
