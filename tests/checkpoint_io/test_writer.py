"""The writer process and the trainer's side of it: what is written, and how the process lives and dies."""

import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from perdure.checkpoint_io.formats import digest_of
from perdure.checkpoint_io.names import local_name, saving_name
from perdure.checkpoint_io.writer_child import FREE_DEATHS
from perdure.checkpoint_io.writer_messages import (
    Failed,
    Released,
    UseLayout,
    Written,
)
from perdure.protocol.checkpoints import SaveId, Tier

from .writing import SHARE, SIZE, VALUES, Trainer, check_shard, children, item, names, sidecar_of, training


@pytest.fixture
def trainer() -> Iterator[Trainer]:
    with training() as trainer:
        yield trainer


# ---- what is written ------------------------------------------------------------------------------------------


def test_two_tiers_the_durable_one_holds_only_the_share(trainer: Trainer, tmp_path: Path) -> None:
    data = trainer.images[1].fill()
    trainer.write(7, tmp_path / "l", tmp_path / "d", 1, values=VALUES)
    told = trainer.finish(7)
    kinds = [(type(each), getattr(each, "tier", None)) for each in told]
    # The image is free before the durable tier has it.
    assert kinds == [(Released, None), (Written, Tier.LOCAL), (Written, Tier.DURABLE)]
    assert told[0] == Released(SaveId(7, 9, 4), 1)

    local, durable = tmp_path / "l" / local_name(SaveId(7, 9, 4)), tmp_path / "d" / saving_name(SaveId(7, 9, 4))
    sidecar = check_shard(local, data, values=2, extra=2)
    assert [each.fqn for each in sidecar.items] == ["w0", "step", "w1", "extra"]
    assert (sidecar.rank, sidecar.world_size, sidecar.held) == (2, 3, ("left.to.others",))
    values = (local / "__2_1.distcp").read_bytes()
    step, extra = sidecar.items[1], sidecar.items[3]
    assert values[step.at : step.at + step.length] == VALUES[0][2]
    assert values[extra.at : extra.at + extra.length] == VALUES[1][2]
    assert (step.file, step.offsets, step.dtype, step.path, step.at % 64, extra.at % 64) == (
        1,
        None,
        "",
        ("step",),
        0,
        0,
    )

    sidecar = check_shard(durable, data[:SHARE], values=1, extra=0)
    assert [each.fqn for each in sidecar.items] == ["w0", "step"]
    for written, folder in zip(told[1:], (local, durable), strict=True):
        assert isinstance(written, Written)
        assert written.digest == digest_of((folder / "__2.shard").read_bytes())
        assert written.nbytes == sum(path.stat().st_size for path in folder.glob("*.distcp"))
        assert 0 < written.seconds < 20


def test_durable_alone_is_written_from_the_image(trainer: Trainer, tmp_path: Path) -> None:
    data = trainer.images[0].fill()
    trainer.write(7, durable=tmp_path)
    assert [type(each) for each in trainer.finish(7)] == [Written, Released]
    check_shard(tmp_path / saving_name(SaveId(7, 9, 4)), data[:SHARE], values=0, extra=0)


def test_large_values_and_layouts_need_no_reader(trainer: Trainer, tmp_path: Path) -> None:
    """They are handed over at once while the process does not read."""
    os.kill(trainer.pid(), signal.SIGSTOP)
    items = tuple(item(number, number, 1) for number in range(20_000))
    trainer.writer.use_layout(UseLayout(2, items, len(items), SIZE, SIZE))
    began = time.monotonic()
    trainer.write(7, tmp_path, values=(("big", ("big",), os.urandom(4 << 20)),), layout=2)
    assert time.monotonic() - began < 2
    os.kill(trainer.pid(), signal.SIGCONT)
    trainer.finish(7)
    assert len(sidecar_of(tmp_path / local_name(SaveId(7, 9, 4))).items) == 20_001


def test_results_come_in_order_on_each_tier(trainer: Trainer, tmp_path: Path) -> None:
    for step in range(10):
        trainer.write(step, tmp_path / "l" if step % 2 else None, tmp_path / "d", step % 2)
    trainer.writer.wait(time.monotonic() + 20)
    for tier, steps in ((Tier.LOCAL, [1, 3, 5, 7, 9]), (Tier.DURABLE, list(range(10)))):
        assert [e.save.step for e in trainer.told if isinstance(e, Written) and e.tier is tier] == steps


def test_a_layout_that_is_not_known_fails_the_save_only(trainer: Trainer, tmp_path: Path) -> None:
    trainer.write(7, tmp_path, layout=77)
    failed, released = trainer.finish(7)
    assert isinstance(failed, Failed)
    assert "layout 77" in failed.why
    assert isinstance(released, Released)


def test_what_cannot_be_asked(trainer: Trainer, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no tier"):
        trainer.write(7)
    os.kill(trainer.pid(), signal.SIGSTOP)
    trainer.write(7, tmp_path)
    with pytest.raises(ValueError, match="already"):
        trainer.write(7, tmp_path)
    os.kill(trainer.pid(), signal.SIGCONT)
    trainer.writer.close(0)
    with pytest.raises(RuntimeError, match="closed"):
        trainer.write(8, tmp_path)


# ---- the process ----------------------------------------------------------------------------------------------


def test_it_imports_nothing_heavy() -> None:
    code = "import sys, perdure.checkpoint_io.writer; print(*sorted({m.split('.')[0] for m in sys.modules}))"
    run = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, timeout=30, check=True)
    assert not {"torch", "zmq", "trio", "numpy", "tqdm"} & set(run.stdout.split())


def test_signals_that_stop_jobs_do_not_reach_it(trainer: Trainer, tmp_path: Path) -> None:
    # At once: it has hardly started.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP):
        os.kill(trainer.pid(), number)
    trainer.write(7, tmp_path)
    assert isinstance(trainer.finish(7)[0], Written)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP):
        os.kill(trainer.pid(), number)
    trainer.write(8, tmp_path)
    assert isinstance(trainer.finish(8)[0], Written)


def test_it_has_only_its_own_descriptors(trainer: Trainer, tmp_path: Path) -> None:
    read, write = os.pipe()
    os.set_inheritable(write, True)
    trainer.write(7, tmp_path)
    trainer.finish(7)
    pid = trainer.pid()
    links = [os.readlink(f"/proc/{pid}/fd/{name}") for name in os.listdir(f"/proc/{pid}/fd")]
    # stdin, stdout, stderr, the socket and two images; not what others let be inherited.
    assert links.count("/dev/null") == 2
    assert len(links) == 6
    assert os.readlink(f"/proc/self/fd/{write}") not in links
    assert os.getsid(pid) == os.getsid(0)
    os.close(read)
    os.close(write)


def test_it_ends_with_its_socket_and_leaves_nothing_unfinished(tmp_path: Path) -> None:
    trainer = Trainer(64 << 20)
    pid = trainer.pid()
    for step in range(8):
        trainer.write(step, tmp_path, image=step % 2)
    trainer.until(lambda: trainer.is_free(0))
    lost = trainer.writer.close(0)
    assert len(lost) >= 4
    assert pid not in children()
    left = names(tmp_path)
    assert not [name for name in left if "tmp" in name]
    complete = {name.split("/")[0] for name in left if name.endswith(".shard")}
    assert {name.split("/")[0] for name in left} == complete
    assert all(any(isinstance(each, Failed | Written) for each in trainer.of(step)) for step in range(8))
    assert all(trainer.is_free(step) for step in range(8))
    trainer.close()


def test_a_killed_process_is_reported_at_once_and_replaced(trainer: Trainer, tmp_path: Path) -> None:
    os.kill(trainer.pid(), signal.SIGSTOP)
    trainer.write(1, tmp_path / "l", tmp_path / "d")
    first = trainer.pid()
    began = time.monotonic()
    os.kill(first, signal.SIGKILL)
    trainer.until(lambda: trainer.is_free(1))
    assert time.monotonic() - began < 2
    assert [each.tier for each in trainer.of(1) if isinstance(each, Failed)] == [Tier.LOCAL, Tier.DURABLE]
    assert "SIGKILL" in trainer.why(1)
    data = trainer.images[0].fill()
    trainer.write(2, tmp_path / "l", tmp_path / "d")
    assert [type(each) for each in trainer.finish(2)] == [Released, Written, Written]
    assert trainer.pid() != first
    check_shard(tmp_path / "l" / local_name(SaveId(2, 9, 4)), data, values=0, extra=1)
    assert any("SIGKILL" in note for note in trainer.notes)


def test_killed_in_the_middle_of_writing_the_same_save_can_be_made_again(tmp_path: Path) -> None:
    trainer = Trainer(128 << 20)
    folder = tmp_path / local_name(SaveId(1, 9, 4))
    temporary = folder / ".__2_0.distcp.tmp"
    data = trainer.images[0].fill()
    trainer.write(1, tmp_path)
    pid = trainer.pid()
    deadline = time.monotonic() + 10
    while not temporary.exists():
        assert time.monotonic() < deadline
    os.kill(pid, signal.SIGKILL)
    trainer.until(lambda: trainer.is_free(1))
    assert isinstance(trainer.of(1)[0], Failed)
    assert names(folder) == [".__2_0.distcp.tmp"]
    trainer.told.clear()
    trainer.write(1, tmp_path)
    assert isinstance(trainer.finish(1)[0], Written)
    check_shard(folder, data, values=0, extra=0)
    trainer.close()


def test_it_is_not_started_again_and_again(trainer: Trainer, tmp_path: Path) -> None:
    os.kill(trainer.pid(), signal.SIGSTOP)
    for step in range(FREE_DEATHS):
        # Each but the first has only just been started for this save, and dies before it is ready.
        trainer.write(step, tmp_path)
        os.kill(trainer.pid(), signal.SIGKILL)
        trainer.until(lambda step=step: trainer.is_free(step))
        assert "SIGKILL" in trainer.why(step)
    trainer.write(50, tmp_path)
    trainer.until(lambda: trainer.is_free(50))
    assert f"died {FREE_DEATHS} times in a row" in trainer.why(50)
    assert children() == []


def test_a_forked_child_does_not_disturb(trainer: Trainer, tmp_path: Path) -> None:
    pid = os.fork()
    if pid == 0:
        try:
            trainer.write(5, tmp_path)
        except RuntimeError:
            trainer.writer.close(0)
            os._exit(0)
        os._exit(1)
    assert os.waitpid(pid, 0)[1] == 0
    trainer.write(7, tmp_path)
    assert isinstance(trainer.finish(7)[0], Written)


def test_a_living_fork_does_not_keep_the_process_alive(tmp_path: Path) -> None:
    """The trainer dies, a child of it lives on: the writer process must end."""
    code = f"""
import os, sys, time
sys.path.insert(0, {str(Path(__file__).parent)!r})
import writing
trainer = writing.Trainer()
pid = trainer.pid()
child = os.fork()
if child == 0:
    time.sleep(60)
print(pid, child, flush=True)
os._exit(0)
"""
    run = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert run.stdout is not None
    pid, child = map(int, run.stdout.readline().split())
    try:
        writer = os.pidfd_open(pid)
        assert select.select([writer], [], [], 10)[0]
        os.close(writer)
    except ProcessLookupError:
        pass
    finally:
        os.kill(child, signal.SIGKILL)
        run.stdout.close()
        run.wait(10)
