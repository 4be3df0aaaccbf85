"""Waits in gloo that no broken connection ends: here, those for a peer that is stopped."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

STORE = """
import sys, torch.distributed as dist
store = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
print(store.port, flush=True)
sys.stdin.read()
"""

RANK = """
import os, signal, sys, threading, time
import torch, torch.distributed as dist
from perdure.worker_runtime.gloo_waits import LostWaits

rank, what, port = int(sys.argv[1]), sys.argv[2], int(sys.argv[3])
store = dist.TCPStore("127.0.0.1", port, None, False)
dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
data = torch.ones(1 << 24)
dist.barrier()
if rank == 1:
    os.kill(os.getpid(), signal.SIGSTOP)
waits = LostWaits()
woken = []
over = threading.Event()

def keep_ending():
    while not over.wait(0.05):
        woken.append(waits.end())

ending = threading.Thread(target=keep_ending, daemon=True)
ending.start()
{"send": dist.send, "receive": dist.recv}[what](data, 1)
over.set()
ending.join()
print("out", sum(woken), flush=True)
os._exit(0)
"""


@pytest.mark.parametrize("what", ["send", "receive"])
def test_a_wait_that_nothing_else_ends(what: str, tmp_path: Path) -> None:
    trainer = tmp_path / "rank.py"
    trainer.write_text(RANK)
    python = [sys.executable, "-W", "ignore"]
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(
        [*python, "-c", STORE], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
    ) as store:
        assert store.stdout is not None
        port = store.stdout.readline().strip()
        ranks = [
            subprocess.Popen([*python, str(trainer), str(rank), what, port], stdout=subprocess.PIPE, env=environment)
            for rank in range(2)
        ]
        try:
            output, _ = ranks[0].communicate(timeout=60)
        finally:
            for rank in ranks:
                rank.kill()
                rank.communicate()
            store.kill()
    assert output.split()[0] == b"out"
    assert int(output.split()[1]) >= 1
