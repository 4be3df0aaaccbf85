"""What is saved: takes in what is told of checkpoints, commits complete ones, and lets go of old ones.

Rules:
1. A shard counts only while its round is the present one. Once the next round is planned, what is unfinished is
   deleted, and a fact that comes later can finish nothing. What was complete by then stays ordered to be published.
2. Facts may come in any order, twice, or late; what has been dropped is deleted again if it shows up again.
3. A save is known to lie on a node until the node's agent is another process: what that one finds, it tells.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from ...protocol.checkpoints import GIVEN_UP, Fact, Place, Publish, Replicate, SaveId, Tier, What, digest_of_save
from ...protocol.names import AgentName
from . import commit_lines, retention
from .events import Saved, Stocked
from .orders import Orders
from .roster import AgentRecord
from .rounds import Round
from .saves import OnTier, SaveRecord
from .vain import Vain

if TYPE_CHECKING:
    from .job import Job

STOCK_TIMEOUT_S = 30.0
"""How long the first round waits for the agents to say which checkpoints they have found."""


class Commits:
    """Every save of a job, and of jobs before it that still lies there."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self.records: dict[SaveId, SaveRecord] = {}
        self.orders = Orders(job.roster, job.depots, job.directives.dirty)
        self.vain = Vain(job, self.records)
        self._dropped: set[tuple[SaveId, Tier]] = set()
        self._takers: dict[What, Callable[[Fact, AgentRecord, bool], None]] = {
            What.WRITTEN: self._written,
            What.FAILED: self._failed,
            What.BAD: self._bad,
            What.PUBLISHED: self._published,
            What.UNPUBLISHED: self._unpublished,
            What.PRUNED: self._pruned,
        }

    # ---- events -----------------------------------------------------------------------------------------------

    def saved(self, event: Saved) -> None:
        self._take(event.agent, event.facts, stock=False)

    def stocked(self, event: Stocked) -> None:
        agent = self._job.roster.agents.get(event.agent)
        if agent is None:
            return
        agent.depot = event.address
        agent.has_looked = agent.has_looked or event.durable
        self._job.depots.changed()
        self._take(event.agent, event.facts, stock=True)
        self._job.directives.dirty(agent)

    def _take(self, name: AgentName, facts: tuple[Fact, ...], *, stock: bool) -> None:
        agent = self._job.roster.agents.get(name)
        if agent is None:
            return
        for fact in facts:
            taker = self._takers.get(fact.what)
            if taker is not None:
                taker(fact, agent, stock)

    # ---- shards -----------------------------------------------------------------------------------------------

    def _written(self, fact: Fact, agent: AgentRecord, stock: bool) -> None:
        round = self._round_of(fact)
        if round is None and not stock:
            self._written_late(fact)
            return
        record = self._record(fact)
        tier = record.on(fact.tier)
        if not 0 <= fact.rank < record.world_size:
            return
        if tier.dropped:
            self._drop_again(fact)
            return
        if fact.rank not in tier.digests:
            tier.digests[fact.rank] = fact.digest
            tier.nbytes += fact.nbytes
            tier.seconds = max(tier.seconds, fact.seconds)
        if fact.tier is Tier.LOCAL:
            self._held(record, fact)
        if not tier.complete and len(tier.digests) == record.world_size:
            self._complete(record, fact.tier, round)
        elif tier.is_hopeless(record.world_size):
            self.drop(record, fact.tier)

    def _held(self, record: SaveRecord, fact: Fact) -> None:
        """A node has a shard: its own, or a copy of another's."""
        holders = record.local.holders.setdefault(fact.rank, [])
        if fact.node in holders:
            return
        holders.append(fact.node)
        self.orders.replicated(record.save, fact.rank, fact.node)
        address, count = self._job.depots.address(fact.node), self._job.settings.replication
        if len(holders) == 1 and record.seen and count and address:
            order = Replicate(record.save, Place(fact.rank, fact.node, address))
            for partner in self._job.depots.partners(fact.node, count):
                self.orders.replicate(order, partner)

    def _written_late(self, fact: Fact) -> None:
        """Not of the present round: a copy of what is complete, or what nobody wants any more."""
        known = self.records.get(fact.save)
        tier = known.on(fact.tier) if known is not None else None
        if known is not None and tier is not None and tier.complete and not tier.dropped:
            if fact.tier is Tier.LOCAL and 0 <= fact.rank < known.world_size:
                self._held(known, fact)
        elif self._is_over(fact.save) or (tier is not None and tier.dropped):
            self._dropped.add((fact.save, fact.tier))
            self._drop_again(fact)

    def _complete(self, record: SaveRecord, tier: Tier, round: Round | None) -> None:
        """All shards of a save are written on a tier."""
        record.on(tier).complete = True
        if round is not None:
            round.saved_step = max(round.saved_step, record.step)
        if tier is Tier.DURABLE:
            record.digest = self.digest(record.durable, record.world_size)
            self._publish_if_wanted(record)
            return
        commit_lines.tell_local(self._job, record)
        for each in retention.local_surplus(self.records.values(), self._job):
            self.drop(each, Tier.LOCAL)

    @staticmethod
    def digest(tier: OnTier, world_size: int) -> bytes:
        return digest_of_save(tier.digests[rank] for rank in range(world_size))

    # ---- publishing -------------------------------------------------------------------------------------------

    def _publish_if_wanted(self, record: SaveRecord) -> None:
        """A step is published once, unless what has its name is of another job, or no good."""
        same_step = [other for other in self.records.values() if other.step == record.step and other is not record]
        if any(other.seen and other.durable_is_good for other in same_step):
            self.drop(record, Tier.DURABLE)
        elif not any(other.save in self.orders.publications for other in same_step):
            over = next((other.save for other in same_step if other.published), None)
            order = Publish(record.save, record.world_size, record.digest, over)
            self.orders.publish(order, self._first_rank())

    def _first_rank(self) -> AgentRecord | None:
        round = self._job.round
        return round.seats[0].agent if round is not None else None

    def _published(self, fact: Fact, agent: AgentRecord, stock: bool) -> None:
        if (fact.save, Tier.DURABLE) in self._dropped:
            self.orders.prune_durable(fact.save, self._first_rank())
            return
        record = self._record(fact)
        others = [other for other in self.records.values() if other.step == record.step and other is not record]
        if any(other.published and other.age > record.age for other in others):
            return  # what was found there before the other one took its name
        if not stock:
            self._give_way(record, agent)
        for other in others:
            other.published = False
        was_published, record.published = record.published, True
        record.durable.complete, record.gave_up = True, False
        record.durable.nbytes = record.durable.nbytes or fact.nbytes
        self.orders.published(record.save)
        if stock or was_published:
            return
        commit_lines.tell_published(self._job, record, fact.seconds)
        self._settle_waiting(record.step)
        for each in retention.durable_surplus(self.records.values(), self._job):
            self.drop(each, Tier.DURABLE)

    def _give_way(self, record: SaveRecord, agent: AgentRecord) -> None:
        """Whoever was to publish another save of this step has found this one in its place."""
        if not record.published or not record.durable_is_good:
            return
        for save, publication in list(self.orders.publications.items()):
            if save.step == record.step and save != record.save and publication.agent == agent.name:
                self.orders.published(save)
                self.drop(self.records[save], Tier.DURABLE)

    def _settle_waiting(self, step: int) -> None:
        """Another save of this step may have waited for what became of the first."""
        for record in list(self.records.values()):
            waits = record.step == step and record.digest and not record.published and not record.gave_up
            if waits and not record.durable.dropped and record.save not in self.orders.publications:
                self._publish_if_wanted(record)

    def _unpublished(self, fact: Fact, agent: AgentRecord, stock: bool) -> None:
        if stock:
            if fact.save.epoch != self._job.epoch:
                self.orders.prune_durable(fact.save, agent)  # what an earlier job has left unfinished
            return
        publication = self.orders.publications.get(fact.save)
        if publication is None or publication.agent != agent.name:
            return  # done meanwhile, or another one's turn
        again = self.orders.try_another(publication)
        commit_lines.tell_unpublished(self._job, fact, agent, publication.agent if again else "")
        if not again:
            self.records[fact.save].gave_up = True
            self._settle_waiting(fact.save.step)

    # ---- trouble ----------------------------------------------------------------------------------------------

    def _failed(self, fact: Fact, agent: AgentRecord, stock: bool) -> None:
        copy = self.orders.replicated(fact.save, fact.rank, fact.node)
        if not copy and not self._is_of_its_rank(fact):
            return
        if copy and fact.save not in self.records:
            return
        record = self._record(fact)
        tier = record.on(fact.tier)
        if fact.why not in tier.failures and fact.why != GIVEN_UP:
            commit_lines.tell_failed(self._job, record, fact, len(tier.failures), copy=copy)
            tier.failures[fact.why] = fact.rank if not copy else -1
        if not copy and not tier.dropped and 0 <= fact.rank < record.world_size:
            tier.failed.add(fact.rank)
            if tier.is_hopeless(record.world_size):
                self.drop(record, fact.tier)
            self.vain.consider(record)

    def _bad(self, fact: Fact, agent: AgentRecord, stock: bool) -> None:
        record = self._record(fact)
        tier = record.on(fact.tier)
        shard = (fact.rank, fact.node if fact.tier is Tier.LOCAL else "")
        if tier.bad if fact.rank < 0 else shard in tier.bad_shards:
            return
        if fact.rank < 0:
            tier.bad = True
        else:
            tier.bad_shards.add(shard)
        commit_lines.tell_bad(self._job, record, fact)

    # ---- deleting ---------------------------------------------------------------------------------------------

    def drop(self, record: SaveRecord, tier: Tier) -> None:
        """Have a save deleted from a tier. It is not resumed from any more."""
        on = record.on(tier)
        on.dropped = True
        self._dropped.add((record.save, tier))
        if tier is Tier.DURABLE:
            self.orders.published(record.save)
            self.orders.prune_durable(record.save, self._first_rank())
            return
        self.orders.stop_replicating(lambda order: order.save == record.save)
        for node in {node: None for nodes in on.holders.values() for node in nodes}:
            self.orders.prune_local(record.save, node)

    def _drop_again(self, fact: Fact) -> None:
        """Something of a dropped save has come to light."""
        if fact.tier is Tier.DURABLE:
            self.orders.prune_durable(fact.save, self._first_rank())
        else:
            self.orders.prune_local(fact.save, fact.node)

    def _pruned(self, fact: Fact, agent: AgentRecord, stock: bool) -> None:
        self.orders.pruned(fact.save, fact.tier, fact.node)
        record = self.records.get(fact.save)
        if record is None:
            return
        if fact.tier is Tier.DURABLE:
            record.durable, record.published = OnTier(dropped=True), False
            self._dropped.add((fact.save, Tier.DURABLE))
        else:
            self._remove_from(record, fact.node)
        self._forget_if_gone(record)

    def _forget_if_gone(self, record: SaveRecord) -> None:
        durable, local = record.durable, record.local
        there = (
            record.published or durable.in_use or any(local.holders.values()) or (local.in_use and not local.dropped)
        )
        if not there and (self._is_over(record.save) or record.save.epoch != self._job.epoch):
            del self.records[record.save]

    # ---- rounds and agents ------------------------------------------------------------------------------------

    def round_planned(self) -> None:
        """A new round: what those before it have not finished is not finished any more."""
        self.vain.forget()
        for record in list(self.records.values()):
            if not self._is_over(record.save):
                continue
            if record.durable.in_use and not record.durable.complete and not record.durable.dropped:
                self.drop(record, Tier.DURABLE)
            if record.local.in_use and not record.local.complete and not record.local.dropped:
                self.drop(record, Tier.LOCAL)
            self._forget_if_gone(record)

    def attached(self, agent: AgentRecord, *, anew: bool) -> None:
        """anew: it is another process than before, and maybe another machine of that name. Its stock will tell."""
        if anew:
            for record in self.records.values():
                self._remove_from(record, agent.node)
            self.orders.forget_node(agent.node)
        self.orders.reassign()

    def _siblings(self, agent: AgentRecord) -> list[AgentRecord]:
        agents = self._job.roster.agents.values()
        return [other for other in agents if other is not agent and other.node == agent.node and not other.lost]

    def lost(self, agent: AgentRecord) -> None:
        """An agent was given up."""
        self.orders.lost(agent)
        for sibling in self._siblings(agent):
            self._job.directives.dirty(sibling)

    @property
    def stock_missing(self) -> list[AgentRecord]:
        """Agents that have not said yet what they have found, where that matters."""
        if not self.wanted:
            return []
        return [agent for agent in self._job.roster.agents.values() if agent.attached and agent.depot is None]

    @property
    def is_blind(self) -> bool:
        """Nobody has told yet what is on the durable tier."""
        return self._job.settings.save is not None and not any(a.has_looked for a in self._job.roster.agents.values())

    @property
    def wanted(self) -> bool:
        """Whether the job has a place for checkpoints."""
        settings = self._job.settings
        return settings.save is not None or settings.non_persistent_local_ckpt_dir is not None

    # ---- helpers ----------------------------------------------------------------------------------------------

    def _round_of(self, fact: Fact) -> Round | None:
        """The present round, if the fact is of it."""
        round, save = self._job.round, fact.save
        if round is None or save.round != round.index or save.epoch != self._job.epoch:
            return None
        return round if fact.world_size in (0, round.size) else None

    def _is_of_its_rank(self, fact: Fact) -> bool:
        """Whether a rank of the present round says it of its own shard; else it is of a copy that nobody wants now."""
        round = self._round_of(fact)
        seat = round.seats.get(fact.rank) if round is not None else None
        return seat is not None and fact.node in ("", seat.agent.node)

    def _is_over(self, save: SaveId) -> bool:
        """Whether it is of a round of this job before the present one."""
        round = self._job.round
        return save.epoch == self._job.epoch and round is not None and save.round < round.index

    def _record(self, fact: Fact) -> SaveRecord:
        record = self.records.get(fact.save)
        if record is None:
            round = self._round_of(fact)
            record = SaveRecord(
                fact.save,
                round.size if round else fact.world_size,
                ours=fact.save.epoch == self._job.epoch,
                seen=round is not None,
            )
            self.records[fact.save] = record
            record.durable.dropped = (fact.save, Tier.DURABLE) in self._dropped
            record.local.dropped = (fact.save, Tier.LOCAL) in self._dropped
        elif not record.world_size:
            record.world_size = fact.world_size
        return record

    @staticmethod
    def _remove_from(record: SaveRecord, node: str) -> None:
        for holders in record.local.holders.values():
            if node in holders:
                holders.remove(node)
