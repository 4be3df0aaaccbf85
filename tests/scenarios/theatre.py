"""Plays a scenario: commands in, the job's log out. The same commands always give the same text.

A scenario file holds blocks: commands, a line `----`, and what came of them up to the next empty line. `#` begins a
comment.

    job [agents=2] [slots=2] [KNOB=VALUE ...]   a job, and time until all its ranks run
    raise SLOT [ERROR]     the function raises            kill SLOT          SIGKILL
    exit SLOT CODE         sys.exit in the function       hang SLOT KIND     livelock, stuck or frozen
    lose AGENT             the machine is gone            relaunch AGENT     its agent is started again
    crash                  SIGKILL of the controller      return             another controller takes over
    stop AGENT             SIGTERM to an agent            wait SECONDS       time passes
    poison STEP            whoever resumes from what was saved there fails
    together               the rest of the block happens without pauses other than `wait`
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from perdure.protocol.knobs import KNOBS, parse
from perdure.protocol.settings import Settings

from ..simulation.agents import SimAgent
from ..simulation.ranks import Hang, SimRank
from ..simulation.world import SETTINGS, World, relaunch

SETTLE_S = 3.0
"""Time that passes after each command. Processes take up to 2 s to start, so after `job` all ranks run."""


class Theatre:
    """One scenario. `play` runs a block and returns what is to be seen of it."""

    def __init__(self) -> None:
        self._world: World | None = None
        self._seen = 0
        self._together = False
        self._commands: dict[str, Callable[..., None]] = {
            "job": self._job,
            "raise": lambda slot, error="ValueError": self._rank(slot).raise_error(error),
            "kill": lambda slot: self._rank(slot).die(-9),
            "exit": lambda slot, code: self._rank(slot).leave(int(code)),
            "hang": lambda slot, kind: self._rank(slot).hang_up(Hang(kind)),
            "lose": lambda name: self.world.kill_agent(self._agent(name), None),
            "relaunch": lambda name: relaunch(self.world, self._agent(name), len(self._agent(name).ranks)),
            "crash": lambda: self.world.controller.crash(),
            "return": lambda: self.world.start_controller(),
            "poison": lambda step: self._poison(int(step)),
            "stop": lambda name: self._agent(name).stop(143, "SIGTERM"),
        }

    @property
    def world(self) -> World:
        assert self._world is not None, "a scenario begins with `job`"
        return self._world

    def play(self, commands: str) -> str:
        self._together = False
        for line in commands.splitlines():
            words = line.partition("#")[0].split()
            if words:
                self._do(*words)
        return "\n".join(self._news())

    def _do(self, command: str, *words: str) -> None:
        if command == "together":
            self._together = True
        elif command == "wait":
            self.world.run(float(words[0]))
        else:
            self._commands[command](*words)
            self.world.run(0.0 if self._together else SETTLE_S)

    def _job(self, *words: str) -> None:
        given = dict(word.split("=", 1) for word in words)
        agents, slots = int(given.pop("agents", 2)), int(given.pop("slots", 2))
        functions, function_s = int(given.pop("functions", 1)), float(given.pop("function_s", 1000))
        knobs: dict[str, object] = {name: parse(KNOBS[name], value, text=True) for name, value in given.items()}
        settings: Settings = msgspec.structs.replace(SETTINGS, **knobs)
        self._world = World(7, [slots] * agents, settings, functions=functions, function_s=function_s)

    def _poison(self, step: int) -> None:
        storage = self.world.storage
        assert storage is not None, "the job has a folder `save`"
        storage.poisoned |= {save for save in storage.written if save.step == step}

    def _news(self) -> list[str]:
        """What the job's log says since the last time, and the seats."""
        world = self.world
        lines = [self._readable(said) for said in world.controller.log[self._seen :]]
        self._seen = len(world.controller.log)
        job = world.controller.job
        if world.controller.finished is not None:
            lines.append(f"> job ended with code {world.controller.finished.code}")
        elif not world.controller.up:
            lines.append("> no controller; ranks in the function: " + ", ".join(self._inside()))
        elif job.round is None:
            lines.append(f"> {job.phase.value}")
        else:
            lives, seated = job.round.lives, sorted(job.round.seats.items())
            seats = " ".join(f"{rank}={record.slot}.{lives[rank]}" for rank, record in seated)
            lines.append(f"> {job.phase.value}, round {job.round.index}: {seats}")
        return lines

    def _readable(self, said: object) -> str:
        level = {"debug": " ", "info": " ", "warning": "!", "error": "!!"}[getattr(said, "level", "info")]
        return f"{level:2} {getattr(said, 'event', '')}: {getattr(said, 'text', '')}".replace("\n", "\n      ")

    def _inside(self) -> list[str]:
        return [f"{rank.slot}.{rank.life}" for rank in self.world.ranks() if rank.place.value == "inside"]

    def _rank(self, slot: str) -> SimRank:
        return next(rank for rank in self.world.ranks() if rank.slot == slot)

    def _agent(self, name: str) -> SimAgent:
        return [agent for agent in self.world.agents if agent.name == name][-1]
