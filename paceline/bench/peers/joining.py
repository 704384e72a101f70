"""Which peers there are, and which of them can join."""

from __future__ import annotations

import threading
from collections.abc import Sequence

from paceline.bench.machine import installed
from paceline.bench.peers import ctranslate2_peer, llama_cpp_peer, transformers_peer
from paceline.bench.peers.interface import Peer, PeerAbsentError, PeerArm, PeerSetup, PeerState

PEERS = (transformers_peer.PEER, ctranslate2_peer.PEER, llama_cpp_peer.PEER)


def importing() -> threading.Thread:
    """A thread that imports what every run of peers needs, while processes start."""
    thread = threading.Thread(target=transformers_peer.import_ahead, daemon=True)
    thread.start()
    return thread


def join(setup: PeerSetup, peers: Sequence[Peer] = PEERS) -> tuple[list[PeerArm], list[PeerState]]:
    """Load every peer that is there; say of the others why they are not."""
    arms: list[PeerArm] = []
    states: list[PeerState] = []
    for peer in peers:
        version = installed(peer.package)
        try:
            arms += peer.load(setup)
        except ImportError as error:
            # One that is installed but cannot be loaded says itself what it lacks.
            why = f"pip install {peer.package}" if version is None else str(error)
            states.append(PeerState(peer.name, version, why))
        except PeerAbsentError as error:
            states.append(PeerState(peer.name, version, str(error)))
        else:
            states.append(PeerState(peer.name, version))
    return arms, states
