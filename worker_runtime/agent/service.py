"""The agent's shell: carries messages, exits and time into the machine, and its actions out.

    run ─┬─ keep_guard          kills what is left if this agent is killed
         ├─ reaper              buries orphans (this agent is a subreaper)
         ├─ Link.run            the controller, wherever it is
         ├─ controller keeper   only where this agent starts the controller itself
         ├─ ForkServer.serve    once the first round runs
         ├─ DepotLink.serve     once a controller is there, if the job keeps checkpoints
         ├─ _clock              deadlines of machine and link
         ├─ _beats, listen_to_signals
         └─ for each process: _listen (its socket), _foresee and _bury (its end)

The machine is called from any of these tasks, at once and without awaiting, so no two of its steps ever interleave.
"""

import os
import signal
import sys
import time
from contextlib import suppress

import trio

from ...protocol.codec import BadMessage, decode_from_rank, encode_rank
from ...protocol.exit_codes import ExitCode
from ...protocol.messages import (
    PROTOCOL_VERSION,
    Beat,
    Directive,
    ExitRecord,
    Hello,
    Phase,
    Remark,
    SlotState,
    Stage,
    Welcome,
)
from ...protocol.names import Slot, this_process
from ...protocol.rank_messages import RANK_MESSAGE_LIMIT, Ready
from .actions import Action, AskStop, KillProcess, Leave, OrderDepot, Say, Spawn, Tell, TellSaved, Write
from .depot_link import DepotHandlers, DepotLink, begin_of
from .environment import helper_environment, rank_environment
from .fork_child import target_of
from .fork_server import LIGHT_MODULES, MODULES, ForkServer
from .guarding import keep_guard
from .hang import Progress, progress_of
from .keeper import keep_controller
from .link import Handlers, Link
from .machine import AgentMachine
from .options import Options
from .processes import RankProcess, SpawnError, finish, kill, kill_tree_now, spawn, wait_exit
from .reaper import become_subreaper, reaper
from .signals import listen_to_signals
from .stderr_tail import open_outlets
from .stdout_relay import StdoutRelay

DELIVERY_S = 2.0
"""How long the last reports may take to be delivered at the end."""


class Agent:
    """One agent, from its start to its exit code."""

    def __init__(self, options: Options) -> None:
        self._options = options
        self._token = os.urandom(16).hex()
        self._machine = AgentMachine(options.agent, options.job, options.slots, options.settings, options.first_index)
        self._link = Link(
            options.job,
            options.run_dir,
            options.environ,
            options.settings.heartbeat_timeout,
            Handlers(
                self._hello, self._welcomed, self._directed, self._refused, self._lost, self._ended, self._complain
            ),
        )
        self._depot = DepotLink(
            helper_environment(options, self._token),
            DepotHandlers(self._link.saved, self._link.stock, self._depot_wrote),
        )
        self._processes: dict[Slot, RankProcess] = {}
        self._spawning: dict[Slot, trio.CancelScope] = {}
        self._outlets = open_outlets(options.settings.monitor_process_logdir)
        self._fork_server: ForkServer | None = None
        self._with_torch = False
        self._nursery: trio.Nursery | None = None
        self._leave: Leave | None = None
        self._told_to_end = False
        self._left = trio.Event()
        self._bell = trio.Event()

    async def run(self) -> int:
        """Supervise until the job is over; the exit code."""
        become_subreaper()
        stdout = StdoutRelay()
        stdout.start()
        async with trio.open_nursery() as guarding:
            await guarding.start(keep_guard, self._token, self._complain)
            async with trio.open_nursery() as nursery:
                self._nursery = nursery
                await nursery.start(reaper)
                await nursery.start(listen_to_signals, self._asked_to_stop, self._options.signalled)
                if self._options.controller and self._leave is None:
                    await nursery.start(
                        keep_controller,
                        self._options.controller,
                        self._complain,
                        self._controller_left,
                        self._farewell_signal,
                    )
                nursery.start_soon(self._link.run)
                nursery.start_soon(self._clock)
                nursery.start_soon(self._beats)
                if self._leave is None:
                    self._do(self._machine.start(time.monotonic()))
                await self._left.wait()
                await self._depot.finish()
                await self._deliver()
                nursery.cancel_scope.cancel()
            guarding.cancel_scope.cancel()
        stdout.close(1.0)
        for outlet in self._outlets:
            outlet.close(1.0)
        assert self._leave is not None
        return self._leave.code

    async def _deliver(self) -> None:
        """The controller should hear of the last exits; if it has died, its successor, which may be on its way."""
        self._link.acknowledge()
        awaited = self._told_to_end and not self._link.up
        with trio.move_on_after(DELIVERY_S):
            while not self._link.idle and (self._link.up or awaited):
                await self._bell.wait()

    # ---- actions ----------------------------------------------------------------------------------------------

    def _do(self, actions: list[Action]) -> None:
        nursery = self._nursery
        assert nursery is not None
        for action in actions:
            match action:
                case Spawn():
                    nursery.start_soon(self._spawn, action)
                case Say():
                    self._say(action)
                case KillProcess():
                    nursery.start_soon(self._kill, action)
                case Tell() | TellSaved() | AskStop():
                    self._tell_controller(action)
                case OrderDepot():
                    self._depot.order(action.orders)
                case Write():
                    self._write(action)
                case Leave():
                    self._leave = action
                    self._left.set()
        self._bell.set()

    def _tell_controller(self, action: Tell | TellSaved | AskStop) -> None:
        match action:
            case Tell():
                self._link.report(action.states)
            case TellSaved():
                self._link.saved(action.facts)
            case AskStop():
                self._link.ask_stop(action.code, action.reason)

    async def _spawn(self, action: Spawn) -> None:
        options = self._options
        env = rank_environment(options, self._machine.settings, self._token)
        server = self._fork_server if action.spare else None
        process, record = None, ExitRecord(-signal.SIGTERM)
        self._spawning[action.slot] = trio.CancelScope()
        try:
            with self._spawning[action.slot]:
                process = await spawn(
                    options.command, action.slot, action.life, env, outlets=self._outlets, fork_server=server
                )
        except SpawnError as error:
            self._complain(str(error))
            record = ExitRecord(127, stderr=str(error))
        finally:
            del self._spawning[action.slot]
        if process is None:
            self._do(self._machine.exited(action.slot, action.life, record, -1, time.monotonic()))
        else:
            self._adopt(process)

    def _adopt(self, process: RankProcess) -> None:
        self._processes[process.slot] = process
        self._do(self._machine.spawned(process.slot, process.life, process.pid))
        nursery = self._nursery
        assert nursery is not None
        nursery.start_soon(self._listen, process)
        nursery.start_soon(self._bury, process)
        killing = self._machine.killing(process.slot, process.life)
        if killing:
            nursery.start_soon(self._kill, KillProcess(process.slot, process.life, killing))

    def _say(self, action: Say) -> None:
        process = self._processes.get(action.slot)
        if process is None or process.life != action.life or process.finished:
            return
        try:
            process.sock.send(encode_rank(action.message))
        except BlockingIOError:
            self._complain(f"{action.slot} has read nothing for so long that its socket is full")
        except OSError:
            pass  # it is dead; its end is reported by `_bury`

    async def _kill(self, action: KillProcess) -> None:
        if action.slot in self._spawning:
            self._spawning[action.slot].cancel()  # it may wait for the fork server's imports
            return
        process = self._processes.get(action.slot)
        if process is None or process.life != action.life:
            return
        self._write(Write("kill", f"killing pid {process.pid}: {action.why}", "warning", action.slot))
        grace_s = self._machine.settings.termination_grace_time
        outcome = await (kill_tree_now(process) if action.at_once else kill(process, grace_s))
        if outcome == "unkillable":
            text = f"pid {process.pid} outlived SIGKILL: this node is not to be trusted"
            self._write(Write("unkillable", text, "error", action.slot))

    def _write(self, line: Write) -> None:
        remark = Remark(line.event, line.text, line.level, line.slot or "")
        if not self._link.remark(remark):
            who = line.slot or self._options.agent
            with suppress(OSError):  # nobody reads it
                print(f"perdure agent {who}: {line.text}", file=sys.stderr, flush=True)

    def _depot_wrote(self, level: str, text: str) -> None:
        self._write(Write("depot", text, level))

    def _complain(self, text: str) -> None:
        self._write(Write("agent", text, "warning"))

    # ---- processes --------------------------------------------------------------------------------------------

    async def _listen(self, process: RankProcess) -> None:
        """Everything that a rank says, until its end closes."""
        while not process.finished:
            try:
                await trio.lowlevel.wait_readable(process.sock)
            except (trio.ClosedResourceError, ValueError, OSError):
                return
            if not self._drain(process):
                return

    def _drain(self, process: RankProcess) -> bool:
        """Take what has arrived; False at the end of the stream."""
        while not process.finished:
            try:
                packet = process.sock.recv(RANK_MESSAGE_LIMIT)
            except BlockingIOError:
                return True
            except OSError:
                return False
            if not packet:
                return False
            try:
                message = decode_from_rank(packet)
            except BadMessage as error:
                self._complain(f"{process.slot} sent what cannot be read: {error}")
                continue
            self._with_torch = self._with_torch or (isinstance(message, Ready) and message.torch)
            step = process.beats.read().step
            self._do(self._machine.rank_said(process.slot, process.life, message, step, time.monotonic()))
        return False

    async def _bury(self, process: RankProcess) -> None:
        """Report the end of a process, then of everything it had started."""
        async with trio.open_nursery() as watching:
            watching.start_soon(self._foresee, process)
            code = await wait_exit(process)
            watching.cancel_scope.cancel()
        self._drain(process)
        record = ExitRecord(code, oom=code == -signal.SIGKILL and process.oom.claim(), stderr=process.stderr.text())
        step = process.beats.read().step
        self._do(self._machine.exited(process.slot, process.life, record, step, time.monotonic()))
        trio.lowlevel.notify_closing(process.sock)
        await finish(process, self._machine.settings.termination_grace_time)
        if self._processes.get(process.slot) is process:
            del self._processes[process.slot]

    async def _foresee(self, process: RankProcess) -> None:
        """A rank begins to die long before the kernel has freed its memory and tells of its end."""
        await process.dying.wait()
        self._look_for_deaths([process])

    def _look_for_deaths(self, processes: list[RankProcess]) -> None:
        for process in processes:
            if not process.finished and process.code is None and process.is_exiting():
                step = process.beats.read().step
                self._do(self._machine.dying(process.slot, process.life, step))

    # ---- the controller ---------------------------------------------------------------------------------------

    def _hello(self, address: str, pending: tuple[SlotState, ...]) -> Hello:
        options = self._options
        return Hello(
            version=PROTOCOL_VERSION,
            agent=options.agent,
            node=options.node,
            host=options.host,
            address=address,
            order=options.order,
            expected=options.expected,
            process=this_process(),
            incarnation=self._machine.incarnation,
            slots=self._machine.states(),
            pending=pending,
            group=options.group,
        )

    def _welcomed(self, welcome: Welcome) -> None:
        self._do(self._machine.welcomed(welcome.incarnation, welcome.settings))
        self._depot.begin_session()
        begin = begin_of(self._options, welcome.settings, self._link.address, self._link.keys)
        if begin is not None and not self._depot.begun:
            assert self._nursery is not None
            self._nursery.start_soon(self._depot.serve, begin)

    def _directed(self, incarnation: int, directive: Directive) -> None:
        self._told_to_end = self._told_to_end or directive.phase is Phase.END
        self._do(self._machine.directed(incarnation, directive, time.monotonic()))
        if directive.phase is Phase.ABORT:
            self._look_for_deaths(list(self._processes.values()))
        if directive.phase is Phase.RUN and self._fork_server is None and self._machine.settings.respawn:
            self._start_fork_server()

    def _refused(self, reason: str) -> None:
        self._do(self._machine.refused(reason, time.monotonic()))

    def _lost(self) -> None:
        self._do(self._machine.link_lost(time.monotonic()))

    def _controller_left(self, code: int) -> None:
        """Our own controller has ended: with the job, or because it could not lead at all."""
        if not self._link.up and self._leave is None:
            self._ended(code or int(ExitCode.INTERNAL), "the controller ended without ending the job")

    def _ended(self, code: int, reason: str) -> None:
        self._do(self._machine.abandoned(code, reason, time.monotonic()))

    def _farewell_signal(self) -> int | None:
        """What our own controller must be told when we leave, if it cannot know that the job is over."""
        if self._told_to_end or self._leave is None:
            return None
        told = {int(ExitCode.INTERRUPTED): signal.SIGINT, int(ExitCode.HANGUP): signal.SIGHUP}
        return told.get(self._leave.code, signal.SIGTERM)

    def _start_fork_server(self) -> None:
        """Only now: before, its imports would have slowed those of the ranks."""
        options = self._options
        modules = MODULES if self._with_torch else LIGHT_MODULES
        self._fork_server = ForkServer(helper_environment(options, self._token), self._complain, modules)
        if target_of(self._options.command, os.getcwd()) is not None:
            assert self._nursery is not None
            self._nursery.start_soon(self._fork_server.serve)

    # ---- time and signals -------------------------------------------------------------------------------------

    async def _clock(self) -> None:
        """Wake for the machine's and the link's deadlines, and for nothing else."""
        while True:
            self._bell = trio.Event()
            self._link.bell = self._bell
            wanted = [at for at in (self._machine.deadline(), self._link.deadline()) if at is not None]
            wait = max(min(wanted) - time.monotonic(), 0.0) if wanted else float("inf")
            with trio.move_on_after(wait):
                await self._bell.wait()
                continue
            now = time.monotonic()
            pages = {slot: self._progress(slot) for slot in self._machine.to_judge(now)}
            self._do(self._machine.tick({slot: page for slot, page in pages.items() if page is not None}, now))
            self._link.poke()

    def _progress(self, slot: Slot) -> Progress | None:
        process = self._processes.get(slot)
        return None if process is None or process.finished else progress_of(process.beats.read())

    async def _beats(self) -> None:
        while True:
            await trio.sleep(self._machine.settings.heartbeat_interval)
            now = time.monotonic()
            ranks: list[tuple[int, int, float]] = []
            for slot, local in self._machine.slots.items():
                page = self._progress(slot) if local.stage is Stage.RUNNING else None
                if page is not None:
                    ranks.append((local.state.index, page.step, round(now - page.last(with_ping=True), 3)))
            self._link.beat(Beat(tuple(ranks)))

    def _asked_to_stop(self, code: int, signal_name: str) -> None:
        self._do(self._machine.stop(code, f"{signal_name} to agent {self._options.agent}", time.monotonic()))
