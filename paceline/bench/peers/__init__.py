"""Other systems on the same checkpoints. Each is one file behind one interface, and joins when installed.

A peer runs in the measuring process while Paceline's processes sleep, on the same device, with the same
number format and as many threads as one of our models has.
"""

from paceline.bench.peers.interface import Peer, PeerAbsentError, PeerArm, PeerSetup, PeerState
from paceline.bench.peers.joining import importing, join

__all__ = ["Peer", "PeerAbsentError", "PeerArm", "PeerSetup", "PeerState", "importing", "join"]
