"""The accuracy, cost and savings of encodings: `python -m bench.encodings`."""
