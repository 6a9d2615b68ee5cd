"""Every error that kvfold raises on purpose.

Each message says which rule was broken, what was received and what to do about it, so that a
caller can show it as it stands. All are `KvfoldError`, and also the built-in class that a caller
who has never heard of kvfold would catch.
"""


class KvfoldError(Exception):
    """Base of every error that kvfold raises at its boundary."""


class UnsupportedModelError(KvfoldError, TypeError):
    """The model, its dtype or its attention implementation is not one that kvfold can fold."""


class PlanError(KvfoldError, ValueError):
    """A plan is malformed, or does not fit the model that it is meant for."""


class RecipeError(KvfoldError, ValueError):
    """A recipe is malformed, or asks for what is not there."""


class MemoryLimitError(KvfoldError, MemoryError):
    """Work is predicted to need more memory than it may take."""


class AttachError(KvfoldError, RuntimeError):
    """An add-on can't be attached to, or used on, this model in its present state."""


class CacheError(KvfoldError, RuntimeError):
    """A cache was asked for something that a folded cache can't give."""


class CorpusError(KvfoldError, ValueError):
    """The calibration or evaluation text is missing, empty, unreadable or too short."""


class FitError(KvfoldError, RuntimeError):
    """A fit can't go on: non-finite activations, a checkpoint of another job, or the like."""


class DivergedError(FitError):
    """A training's loss is no longer a number: its weights can't be used, and are not kept."""


class AddOnError(KvfoldError, ValueError):
    """An add-on's files are missing, damaged, unsafe, or belong to another model."""


class EngineSettingError(KvfoldError, ValueError):
    """The vLLM engine can't run this add-on, or not with these settings of its own."""


class SnapshotError(KvfoldError, ValueError):
    """A stored cache is missing, damaged, or was made by another model, add-on, plan or dtype."""


class MissingExtraError(KvfoldError, ImportError):
    """An optional dependency is not installed; the message names the extra that brings it."""


class EvaluationError(KvfoldError, RuntimeError):
    """A measurement gave something that is not a number, or was asked of nothing."""


class PeerError(KvfoldError, RuntimeError):
    """Another project's method can't be asked: its environment, its worker or its answer."""


class ReportError(KvfoldError, OSError):
    """A report can't be written where it was asked for."""


class FolderError(KvfoldError, OSError):
    """A folder that work is to go into can't be held or written."""


class ModelNotFoundError(KvfoldError, OSError):
    """There is no model of this name, neither embedded nor in a folder nor on the hub."""


class RequestError(KvfoldError, ValueError):
    """A request to the engine or the server asks for what can't be had.

    param: the part of the request at fault. code: a short name of the fault that programs can read.
    """

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.param = param
        self.code = code


class AddressError(KvfoldError, OSError):
    """The server can't listen where it was asked to."""


class QueueFullError(KvfoldError, RuntimeError):
    """As many requests wait as may; try again later."""


class EngineClosedError(KvfoldError, RuntimeError):
    """The engine is shutting down, or has ended because of a fault."""
