"""What can go wrong, as one tree::

    MpishardError
    ├── ConfigError          a setting, a file or a launch that the user can mend (exit code 2)
    │   ├── CheckpointError  a checkpoint that cannot be written, is damaged or is of another model
    │   ├── DataError        a token file that is missing, damaged or does not fit the model
    │   └── LaunchError      a rank cannot join the job; it alone knows, and says so
    ├── CommError            a collective that was bound or started differently on different ranks
    └── EngineError          a bug in a schedule, a layer or a plan
        ├── ScheduleError    a step that is not in a legal order
        ├── ArenaError       memory used that was not planned
        └── ShapeError       an operation given arrays that do not fit together

Messages say what was found, what was expected and how to mend it, in one line.
"""

__all__ = [
    "ArenaError",
    "CheckpointError",
    "CommError",
    "ConfigError",
    "DataError",
    "EngineError",
    "LaunchError",
    "MpishardError",
    "ScheduleError",
    "ShapeError",
]


class MpishardError(Exception):
    """Base of every error that this package raises on purpose."""


class ConfigError(MpishardError):
    """The user asked for something that cannot be done; the message names the remedy."""


class CheckpointError(ConfigError):
    """A checkpoint or a file of weights cannot be written or read, is damaged, or is of another model."""


class DataError(ConfigError):
    """A token file is missing, damaged, too small or of another vocabulary."""


class LaunchError(ConfigError):
    """This rank cannot join the job: what it needs is not there. The others cannot know it."""


class CommError(MpishardError):
    """Ranks disagree about a collective, or a peer is gone."""


class EngineError(MpishardError):
    """A step was built or run wrongly; never the user's mistake."""


class ScheduleError(EngineError):
    """An instruction stands where it must not: a unit read before it arrived, say."""


class ArenaError(EngineError):
    """A region or a stack holds more, or other things, than were planned."""


class ShapeError(EngineError):
    """Arrays given to an operation do not fit together."""
