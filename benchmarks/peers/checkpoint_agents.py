"""The crowd of `scale_agents.py`, whose ranks also save: for the commit part of `checkpoint.py`.

A further command, `save:N`: every agent reports that the shards of its ranks of step N are durable, all in one message.
The agent that is ordered to publish says at once that it has.
"""

import time

from scale_agents import Agent, Crowd, main

from perdure.protocol.checkpoints import Fact, SaveId, Tier, What
from perdure.protocol.codec import encode_body
from perdure.protocol.messages import Directive, Saved

SHARD_BYTES = 1 << 30


class SavingAgent(Agent):
    def save(self, step: int) -> None:
        directive = self.directive
        save = SaveId(step, directive.epoch, directive.round)
        facts = [
            Fact(
                *(save, What.WRITTEN, Tier.DURABLE, seat.rank),
                world_size=directive.world_size,
                nbytes=SHARD_BYTES,
                digest=seat.rank.to_bytes(16, "little"),
                seconds=1.0,
            )
            for seat in directive.seats
        ]
        self.tell(facts)

    def obey(self, directive: Directive) -> None:
        super().obey(directive)
        self.tell(
            [
                Fact(order.save, What.PUBLISHED, Tier.DURABLE, world_size=order.world_size, digest=order.digest)
                for order in directive.depot.publish
            ]
        )

    def tell(self, facts: list[Fact]) -> None:
        if facts:
            self.reports.push(encode_body(Saved(tuple(facts))), time.monotonic())


class SavingCrowd(Crowd):
    agent_type = SavingAgent

    def obey(self, command: str) -> None:
        name, _, step = command.partition(":")
        if name != "save":
            super().obey(command)
            return
        self.events.emit("saving", step=int(step))
        for agent in self.agents:
            assert isinstance(agent, SavingAgent)
            agent.save(int(step))
            agent.flush()
        self.events.emit("saved", step=int(step))

    def count(self, directive: Directive) -> None:
        for order in directive.depot.publish:
            self.events.emit("ordered", step=order.save.step)
        super().count(directive)


if __name__ == "__main__":
    main(SavingCrowd)
