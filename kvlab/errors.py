"""The errors a person meets by name. A wrong setting is a plain `ValueError` that names it, its value and the allowed range."""


class UnsupportedModel(ValueError):
    """The model loads elsewhere, but kvlab cannot work with it; the text says what was looked for."""


class ModelUnavailable(OSError):
    """The model's files cannot be had: no network, no such folder, no room; the text says what was tried."""


class DamagedModel(ModelUnavailable):
    """The model's files are there but are not what they should be; the text says which, and how to repair it."""


class Cancelled(Exception):
    """Raised by a progress callback to end long work; nothing is recorded of the run."""
