"""Other systems on the same checkpoints. Each is one file behind one interface, and joins when installed.

A peer runs in the measuring process while Paceline's processes sleep, on the same device, with as many
threads as one of our models has. It computes in the same number format (float32 on a CPU, unless another is
asked for) and has its weights in it too, where ours may be in 16 bits and a draft's in 8 (decisions 41, 50).
"""

from paceline.bench.peers.interface import Peer, PeerAbsentError, PeerArm, PeerSetup, PeerState
from paceline.bench.peers.joining import importing, join

__all__ = ["Peer", "PeerAbsentError", "PeerArm", "PeerSetup", "PeerState", "importing", "join"]
