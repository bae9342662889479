"""A communicator that is closed too early says so; nobody waits for ever."""

import numpy as np
import pytest

from mpishard.array.numpy_ops import NumpyOps
from mpishard.errors import CommError

pytestmark = pytest.mark.mpi


def test_closing_with_a_collective_in_flight_is_refused():
    from mpi4py import MPI

    from mpishard.comm.mpi import MpiCommunicator
    from mpishard.comm.pump import Flight

    comm = MpiCommunicator(MPI.COMM_WORLD, NumpyOps(), threaded=True)
    shard = np.zeros(1000, np.float32)
    gather = comm.bind_all_gather(shard, np.zeros(1000 * comm.size, np.float32))
    # A receive that nothing answers keeps the pump busy until it is cancelled.
    lone = comm._mpi.Irecv([np.zeros(1), MPI.DOUBLE], comm.rank, 7)
    flight = Flight("a lone receive", lambda: [lone])
    comm._pump.submit(flight)
    with pytest.raises(CommError, match="closed with collectives in flight"):
        comm.close()
    gather.start().wait_inputs()  # the communicator still works
    comm._mpi.Send([np.ones(1), MPI.DOUBLE], comm.rank, 7)
    comm._pump.finish(flight)
    comm.close()
    comm.close()
