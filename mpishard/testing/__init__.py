"""The contracts of layers, models and communicators as suites that anything can be run through; no test tool is needed.

Each raises :class:`ContractError` with what was found and what the contract asks, in words for the author of the
layer, the model or the transport::

    check_layer(lambda: MyLayer(...), x_shape)      # one layer, by itself
    check_loss(lambda: MyHead(...), x_shape, classes=...)
    check_model(lambda: my_model(...))              # a whole model, through the engine
    run_threads(3, check_communicator)              # a transport, on every rank of it
"""

from mpishard.testing.communicator import CHECKS, check_communicator
from mpishard.testing.contract import ContractError
from mpishard.testing.layer import check_layer, check_loss
from mpishard.testing.model import check_model

__all__ = ["CHECKS", "ContractError", "check_communicator", "check_layer", "check_loss", "check_model"]
