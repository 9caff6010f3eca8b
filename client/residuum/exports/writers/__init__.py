"""The file formats of captures: a module for each, with its name, whose `write` the export calls (`formats`)."""
