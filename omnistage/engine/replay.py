"""Runs a record again and says where it first differs; runs a failed request again, alone.

A record is replayed without orchestrator and sockets: every life of every stage replica takes its journal's entries in
order, and waits only for chunks that another one has not given out yet. Nothing depends on time, threads or processes.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path

import msgspec

from omnistage.config.model import CLIENT
from omnistage.config.registry import load_pipeline
from omnistage.connectors.inline import LocalStore
from omnistage.engine.answer_hash import AnswerHash
from omnistage.engine.async_engine import AsyncOmniEngine
from omnistage.engine.record_files import Ended, ReadRecord, versions
from omnistage.errors import ErrorInfo, OmniError
from omnistage.messages import ChunkKey
from omnistage.runtime.host import prepare_process
from omnistage.runtime.journal import DIGEST_BYTES, Entry, JournalName, RecordError, Stepped, read_journal
from omnistage.runtime.plan import ReplicaId, host_of, host_plans
from omnistage.runtime.replica import EngineSetup
from omnistage.runtime.rerun import Difference, Differs, Given, StageRerun

Wanted = tuple[str, int, str, int]


class ReplayReport(msgspec.Struct, kw_only=True):
    """What a replay found. `answers` were given again byte for byte; `cut_off` are stages whose journal ends in the
    middle (a killed process, a full record); `other_versions` are packages that differ from the recorded ones."""

    requests: int
    answers: int
    steps: int
    recorded_schedule: str
    schedule: str
    difference: Difference | None = None
    cut_off: list[str] = []
    other_versions: list[str] = []

    @property
    def same(self) -> bool:
        return self.difference is None


class BundleReport(msgspec.Struct, kw_only=True):
    """How a failed request ended when it ran again alone."""

    request: str
    recorded: ErrorInfo | None
    replayed: ErrorInfo | None
    other_versions: list[str] = []

    @property
    def same(self) -> bool:
        return self.recorded == self.replayed


class _Post:
    """Chunks on their way from stage to stage, and what clients get."""

    def __init__(self, record: ReadRecord) -> None:
        self._record = record
        self._chunks: dict[ChunkKey, tuple[Given, int]] = {}
        self._answers: dict[tuple[str, int], AnswerHash] = {}
        self._edges = {name: began.edges for name, began in record.requests.items()}

    def put(self, given: Given) -> None:
        """Takes what a stage gave out."""
        targets = [target for source, target in self._edges_of(given.key.request_id) if source == given.key.source]
        to_client = [target for target in targets if target.startswith(f"{CLIENT}.")]
        if to_client:
            self._answer(given)
        if len(targets) > len(to_client):
            self._chunks[given.key] = (given, len(targets) - len(to_client))

    def take(self, stage: str, wanted: Wanted) -> Given | None:
        """The chunk that a stage waits for, if it is there."""
        request, epoch, port, seq = wanted
        source = next((s for s, target in self._edges_of(request) if target == f"{stage}.{port}"), "")
        if source.startswith(f"{CLIENT}."):
            name = self._record.requests[request].inputs[source.partition(".")[2]]
            return Given(ChunkKey(request, epoch, source, seq), True, self._record.payload(name))
        key = ChunkKey(request, epoch, source, seq)
        given, readers = self._chunks.pop(key, (None, 0))
        if given is not None and readers > 1:
            self._chunks[key] = (given, readers - 1)
        return given

    def _edges_of(self, request: str) -> list[tuple[str, str]]:
        return self._edges.get(request, [])

    def _answer(self, given: Given) -> None:
        request = given.key.request_id
        ended = self._record.answers.get(request)
        if ended is None:
            return
        place = (request, given.key.epoch)
        if place not in self._answers:
            self._answers[place] = AnswerHash({(part.source, part.name): part.nbytes for part in ended.parts})
        meta = given.payload.meta
        ids = tuple(meta.get("token_ids", ()))
        self._answers[place].take(given.key.source, str(meta.get("text", "")), ids, given.payload)

    def given_again(self, ended: Ended) -> bool:
        """True when one of the request's runs gave what its client got."""
        mine = [found.parts() for (request, _), found in self._answers.items() if request == ended.id]
        return not ended.parts or ended.parts in mine


class _ScheduleHash:
    """A hash of which requests ran in which steps with how many rows."""

    def __init__(self) -> None:
        self._stages: dict[str, hashlib.blake2b] = {}

    def take(self, name: JournalName, entry: Entry) -> None:
        if isinstance(entry, Stepped):
            digest = self._stages.setdefault(name.file, hashlib.blake2b(digest_size=DIGEST_BYTES))
            digest.update(msgspec.msgpack.encode((entry.only, entry.batch, entry.rows)))

    def text(self) -> str:
        whole = hashlib.blake2b(digest_size=DIGEST_BYTES)
        for name, digest in sorted(self._stages.items()):
            whole.update(name.encode() + digest.digest())
        return whole.hexdigest()


class Replay:
    """One run of a record. Raises RecordError for one that was changed or is not complete."""

    def __init__(self, record: ReadRecord) -> None:
        if not record.journals:
            raise RecordError("replay: the record has no stage journal")
        self._record = record
        self._post = _Post(record)
        self._schedule = _ScheduleHash()
        self._lives: list[StageRerun] = []

    def run(self) -> ReplayReport:
        """Everything again, up to the first difference."""
        difference: Difference | None = None
        try:
            self._open()
            while sum(self._advance(life) for life in self._lives):
                pass
        except Differs as found:
            difference = found.difference
        finally:
            for life in self._lives:
                life.close()
        stuck = [life for life in self._lives if not life.ended]
        answered = [ended for ended in self._record.answers.values() if self._post.given_again(ended)]
        if difference is None and not stuck:
            difference = self._answer_difference(answered)
        return ReplayReport(
            requests=len(self._record.requests),
            answers=len(answered),
            steps=sum(life.steps for life in self._lives),
            recorded_schedule=self._recorded_schedule(),
            schedule=self._schedule.text(),
            difference=difference,
            cut_off=[] if difference is not None else [life.name.stage for life in stuck],
            other_versions=other_versions(self._record),
        )

    def _recorded_schedule(self) -> str:
        recorded = _ScheduleHash()
        for name, file in self._record.journals.items():
            for entry in _entries(file):
                recorded.take(name, entry)
        return recorded.text()

    def _open(self) -> None:
        config = self._record.header.config
        plans = host_plans(config)
        prepare_process(max(plan.threads for plan in plans))
        pipeline, store = load_pipeline(config.pipeline), LocalStore()
        for name, file in self._record.journals.items():
            replica = ReplicaId(name.stage, name.replica)
            setup = EngineSetup(config, pipeline, replica, store)
            self._lives.append(StageRerun(setup, name, _entries(file), host_of(plans, replica).threads))

    def _advance(self, life: StageRerun) -> bool:
        """Takes a stage as far as it comes; False when that is nowhere."""
        life.use()
        moved = False
        while not life.ended:
            chunk: Given | None = None
            if (wanted := life.waits_for) is not None:
                chunk = self._post.take(life.name.stage, wanted)
                if chunk is None:
                    break
            entry, given = life.apply(chunk)
            self._schedule.take(life.name, entry)
            for each in given:
                self._post.put(each)
            moved = True
        return moved

    def _answer_difference(self, answered: list[Ended]) -> Difference | None:
        same = {ended.id for ended in answered}
        odd = next((ended for ended in self._record.answers.values() if ended.id not in same), None)
        return (
            None if odd is None else Difference(CLIENT, 0, odd.id, "its client got other bytes than these stages give")
        )


def _entries(file: Path) -> Iterator[Entry]:
    return read_journal(file, Entry)


async def replay_bundle(record: ReadRecord) -> BundleReport:
    """Runs the request of a bundle alone, in an engine like the recorded one."""
    (began,) = record.requests.values()
    request = msgspec.structs.replace(began.request, seed=began.seed)
    media = {key: record.payload(name) for key, name in began.media.items()}
    recorded = record.answers[request.id].error
    replayed: ErrorInfo | None = None
    async with AsyncOmniEngine(record.header.config) as engine:
        try:
            async for output in engine.generate(request, media):
                replayed = output.error
        except OmniError as error:
            replayed = error.info
    return BundleReport(request=request.id, recorded=recorded, replayed=replayed, other_versions=other_versions(record))


def other_versions(record: ReadRecord) -> list[str]:
    """One line per package that is not of the recorded version."""
    now, then = versions(), record.header.versions
    return [f"{name} {then.get(name)} -> {now.get(name)}" for name in then if then.get(name) != now.get(name)]
