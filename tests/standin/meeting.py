"""Ranks that exchange messages, as threads of one process or as processes of one machine: sockets, and no MPI.

What arrives is read at once by a thread for each peer, so a sender never waits for a receiver here; NCCL's rule that
it does is kept by nccl.py, which asks for the receiver's word first.
"""

from __future__ import annotations

import contextlib
import queue
import socket
import struct
import threading
import time

__all__ = ["Gone", "Meeting"]

_HEAD = struct.Struct("<qq")


class Gone(RuntimeError):  # noqa: N818
    """A peer did not come, or has left."""


class Meeting:
    """This rank's connections to all the others; made when all have come.

    Args:
        key: names the meeting on this machine.
        rank, size: this rank, and how many there are.
        patience: seconds to wait for others, here and in :meth:`receive`.
    """

    def __init__(self, key: str, rank: int, size: int, patience: float) -> None:
        self.rank, self.size, self.patience = rank, size, patience
        self._peers: dict[int, socket.socket] = {}
        self._inboxes: dict[int, queue.Queue[tuple[bytes, bytes] | None]] = {r: queue.Queue() for r in range(size)}
        self._locks = {r: threading.Lock() for r in range(size)}
        self._closed = False
        name = f"\0standin-{key}-"
        with socket.socket(socket.AF_UNIX) as door:
            door.bind(f"{name}{rank}")
            door.listen(size)
            door.settimeout(patience)
            for peer in range(rank):
                self._peers[peer] = self._call(f"{name}{peer}", peer)
            while len(self._peers) < size - 1:
                try:
                    caller, _ = door.accept()
                except TimeoutError:
                    raise Gone(f"rank {rank} waited {patience:g} s for all {size} ranks to come") from None
                self._peers[struct.unpack("<q", _exactly(caller, 8))[0]] = caller
        for peer, line in self._peers.items():
            line.settimeout(None)
            threading.Thread(target=self._listen, args=(peer, line), name=f"standin {rank}<{peer}", daemon=True).start()

    def _call(self, name: str, peer: int) -> socket.socket:
        deadline = time.monotonic() + self.patience
        while True:
            line = socket.socket(socket.AF_UNIX)
            try:
                line.connect(name)
            except OSError:
                line.close()
                if time.monotonic() > deadline:
                    raise Gone(f"rank {self.rank} waited {self.patience:g} s for rank {peer} to come") from None
                time.sleep(0.002)
                continue
            line.sendall(struct.pack("<q", self.rank))
            return line

    def _listen(self, peer: int, line: socket.socket) -> None:
        try:
            while True:
                tag, body = _HEAD.unpack(_exactly(line, _HEAD.size))
                self._inboxes[peer].put((_exactly(line, tag), _exactly(line, body)))
        except (OSError, Gone):
            self._inboxes[peer].put(None)

    def send(self, peer: int, tag: str, body: bytes = b"") -> None:
        if peer == self.rank:
            self._inboxes[peer].put((tag.encode(), body))
            return
        name = tag.encode()
        try:
            with self._locks[peer]:
                self._peers[peer].sendall(_HEAD.pack(len(name), len(body)) + name + body)
        except OSError:
            raise Gone(f"rank {peer} has left (rank {self.rank} sends it {tag})") from None

    def receive(self, peer: int, expected: str) -> bytes:
        """Return the next message of a peer.

        Raises:
            Gone: it has left, or nothing came in time.
            ValueError: the message is another one.
        """
        try:
            message = self._inboxes[peer].get(timeout=self.patience)
        except queue.Empty:
            raise Gone(f"rank {self.rank} waited {self.patience:g} s for {expected} of rank {peer}") from None
        if message is None:
            self._inboxes[peer].put(None)
            raise Gone(f"rank {peer} has left (rank {self.rank} waits for its {expected})")
        if message[0].decode() != expected:
            raise ValueError(f"rank {self.rank} is in {expected}, rank {peer} in {message[0].decode()}")
        return message[1]

    def close(self) -> None:
        """Leave; who waits for this rank, and whoever waits here, is told."""
        self._closed = True
        for line in self._peers.values():
            with contextlib.suppress(OSError):
                line.shutdown(socket.SHUT_RDWR)
            line.close()
        self._inboxes[self.rank].put(None)


def _exactly(line: socket.socket, count: int) -> bytes:
    data = bytearray()
    while len(data) < count:
        more = line.recv(min(count - len(data), 1 << 20))
        if not more:
            raise Gone("the line was closed")
        data += more
    return bytes(data)
