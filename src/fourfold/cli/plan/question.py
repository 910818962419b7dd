"""Plan question: what one planning needs: a task's facts, a machine's prices, the fields that are pinned.

Law: a question is made once per task and machine; lists of devices, memory or batches do not make the facts again.
"""

import dataclasses
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from fourfold.axes.tensor.rules.dims import marked_dims
from fourfold.cli import job, task_loader
from fourfold.cli.plan.arguments import BATCH, BATCH_SIZE, GPT, WHERE, PlanArguments
from fourfold.cli.plan.machine import Machine, calibration_run, described_machine, this_machine
from fourfold.cli.run import Run, read_plan_text
from fourfold.environment.fast_imports import collection_paused
from fourfold.launcher.process_defaults import default_num_processes
from fourfold.plan.ask import AUTO, Ask
from fourfold.plan.plan import Plan
from fourfold.plan.recipes import ASK_PREFIX, RECIPE_PREFIX, SHIPPED_ASKS
from fourfold.planner.predict.facts import FactsSource, Workload
from fourfold.planner.predict.prediction import Prediction
from fourfold.planner.search.decision import Decision, Progress
from fourfold.planner.search.search import NO_DIMS
from fourfold.words.errors import PlanError, Problem, SettingError
from fourfold.words.field import Field, read_words
from fourfold.words.mesh import AXES
from fourfold.words.task import Task

SEARCH_SECONDS = 15.0  # large questions are answered within a minute, of which baselines and reasons take a part


@dataclass(frozen=True)
class Question:
    """What is to be planned. `task`: for people; `is_task`: it can be trained, and is no formula.

    progress  of all questions of the command
    """

    task: str
    is_task: bool
    source: FactsSource
    machine: Machine
    ask: Ask
    dims: Mapping[str, bool] = field(default_factory=dict)
    progress: Progress = field(default_factory=Progress)
    search_seconds: float = SEARCH_SECONDS

    @property
    def workload(self) -> Workload:
        """The work of a step, and the peak of the devices in the dtype of the model, if it is known."""
        precision = self.ask.pinned.get("precision", Plan().precision)
        return Workload.of(
            self.source,
            task=self.task,
            machine=self.machine.text,
            memory_bytes=self.ask.memory_bytes or self.machine.cluster.memory_bytes,
            peak_flops=self.machine.peak_flops(str(precision)),
        )

    def predict(self, plan: Plan) -> Prediction:
        """What a plan would take. Raises PlanError."""
        from fourfold.plan.lowering import lower
        from fourfold.planner.predict.clusters import topology_of
        from fourfold.planner.predict.step import predict_step

        cluster = self.machine.cluster
        topology = topology_of(cluster, plan.mesh.size)
        blueprint = lower(plan, self.source.specs(plan), topology, self.source.update_spec)
        return predict_step(blueprint, self.source, self.machine.prices, reserve_bytes=cluster.reserve_bytes)

    def decide(self) -> Decision:
        """The best plans. Raises PlanError if none fits."""
        from fourfold.planner.search.answer import decide

        self.progress.best = None
        self.progress.begin("counting what the model computes")
        machine = self.machine
        with collection_paused():  # of tables that only grow: else a third of the time
            decision = decide(
                self.ask,
                self.source,
                machine.prices,
                machine.cluster,
                dims=self.dims,
                progress=self.progress,
                deadline=time.monotonic() + self.search_seconds,
            )
            return dataclasses.replace(decision, fewer=self._fewer(decision.answer.plan.mesh.size))

    def _fewer(self, num_devices: int) -> dict[int, Prediction]:
        """The best baselines on 1, 2, 4, … devices, on those numbers where there is one."""
        from fourfold.planner.search.answer import best_baseline_on

        found = {}
        for number in (2**power for power in range((num_devices - 1).bit_length())):
            machine = self.machine.with_fewer(number, self.source)
            if machine is not None:
                found[number] = best_baseline_on(number, self.ask, self.source, machine.prices, machine.cluster)
        return {number: each for number, each in found.items() if each is not None}


class TaskSource(NamedTuple):
    """A task as it is planned.

    run    with which this machine is measured for it; None: it is a formula
    dims   that its tensor rules name, and whether they are on the tensor axis where the plan does not say
    """

    name: str
    source: FactsSource
    run: Run | None
    dims: Mapping[str, bool] = NO_DIMS


class Questions:
    """The questions of one command: what several of them share, is made once.

    devices  how many there are, where no word says so
    """

    def __init__(self, arguments: PlanArguments, *, devices: int | None) -> None:
        self._arguments, self._devices, self.progress = arguments, devices, Progress()
        self._sources: dict[tuple[str, ...], TaskSource] = {}
        self._machines: dict[tuple[object, ...], Machine] = {}

    def make(self, changes: Mapping[str, str] | None = None) -> Question:
        """The question of the command, with these words in place of its own. Raises FourfoldError."""
        arguments = self._arguments.with_changes(changes or {})
        ask = read_ask(arguments, devices=self._devices)
        self.progress.begin("reading the task")
        task = self._task(arguments)
        self.progress.begin("")  # a machine that is measured says so itself
        machine = self._machine(arguments, task, ask)
        if ask.devices is None:
            ask = ask.with_changes(devices=machine.cluster.num_devices)
        is_formula = task.run is None
        if is_formula and not ("precision" in ask.pinned or "precision" in ask.requested):
            ask = ask.with_changes(precision=machine.mixed_precision)
        source = task.source
        if (batch := arguments.run.texts.get(BATCH)) is not None:
            source = source.resized(BATCH_SIZE.read(BATCH, batch, where=WHERE))
        seconds = arguments.value("search_seconds", SEARCH_SECONDS)
        seconds = math.inf if seconds is None else seconds
        return Question(task.name, not is_formula, source, machine, ask, task.dims, self.progress, seconds)

    def _task(self, arguments: PlanArguments) -> TaskSource:
        run = arguments.run.without_plan.without([BATCH])
        words = tuple(run.words)
        if words not in self._sources:
            is_formula = run.named_task == GPT
            self._sources[words] = TaskSource(*gpt_source(words), None) if is_formula else trained_task(run)
        return self._sources[words]

    def _machine(self, arguments: PlanArguments, task: TaskSource, ask: Ask) -> Machine:
        cluster, network = arguments.value("cluster"), arguments.value("network")
        devices = ask.devices or _size_of(ask)
        key = (cluster, network, devices, task.name, task.run and tuple(task.run.words))
        if key not in self._machines:
            if cluster is not None:
                self._machines[key] = described_machine(cluster, devices=devices, network=network)
            else:
                self._machines[key] = self._here(task, devices or default_num_processes(), arguments)
        return self._machines[key]

    @staticmethod
    def _here(task: TaskSource, devices: int, arguments: PlanArguments) -> Machine:
        if task.run is None:
            problem = Problem("gpt without a cluster", "the machine that the formula is for", "cluster=dgx-a100")
            raise SettingError(problem, where=WHERE)
        if "network" in arguments.own:
            problem = Problem("network = … without a cluster", "a cluster with a network", "cluster=FILE.toml")
            raise SettingError(problem, where=WHERE)
        return this_machine(task.run, task.source, devices, is_forced=arguments.value("force", False))


def _size_of(ask: Ask) -> int | None:
    """The number of devices that pinned axes make, if dp is one of them: an axis that is not named is 1."""
    sizes = {axis: value for axis in AXES if isinstance(value := ask.pinned.get(axis), int)}
    return math.prod(sizes.values()) if "dp" in sizes else None


def trained_task(run: Run) -> TaskSource:
    """The task of a run. Raises FourfoldError."""
    from fourfold.planner.task_facts.source import TaskFacts

    with collection_paused():
        prepared = job.parse_job(run, has_run_dir=False)
    source = TaskFacts(with_batch_size(prepared.task, prepared.task_name))
    return TaskSource(prepared.task_name, source, calibration_run(prepared), marked_dims(prepared.task.tensor))


def with_batch_size(task: Task, name: str) -> Task:
    """The task with the batch size that it trains with: that of its DataLoader, if it says none itself."""
    from fourfold.trainer.run_length import with_sizes
    from fourfold.trainer.settings import make_settings

    if task.batch_size is not None:
        return task
    data = task_loader.open_task_data(task, spec=name).train
    return dataclasses.replace(task, batch_size=with_sizes(make_settings(task), task, data).batch_size)


def read_ask(arguments: PlanArguments, *, devices: int | None) -> Ask:
    """The ask of a command line: its file, with what the words pin. Raises PlanError."""
    run, kept = arguments.run, arguments.kept
    ask = _ask_of_file(run.ask or run.plan_file)
    if kept is not None:  # in place of what its settings file says
        run = dataclasses.replace(run, settings_file=None)
    pinned = {**(kept or {}), **run.pinned_fields(), **dict.fromkeys(run.opened, AUTO)}
    given = {"devices": arguments.value("devices") or ask.devices or devices}
    given |= {"memory": int(memory)} if (memory := arguments.value("memory")) else {}
    return ask.with_changes(**{**pinned, **given})


def _ask_of_file(name: str | None) -> Ask:
    if name is None:
        return Ask()
    if name.startswith(ASK_PREFIX):
        return Ask.from_toml(SHIPPED_ASKS.text(name.removeprefix(ASK_PREFIX)), where=name)
    return Ask.from_toml(read_plan_text(name), where=name)


# ---- a GPT by formula ------------------------------------------------------------------------------------------------


GPT_FIELDS = {
    "layers": Field(type=int, minimum=1, maximum=2**10),
    "width": Field(type=int, minimum=1, maximum=2**20),
    "heads": Field(type=int, minimum=1, maximum=2**20),
    "vocabulary": Field(type=int, minimum=1, maximum=2**24, default=51200),
    "length": Field(type=int, minimum=1, maximum=2**24, default=2048),
    BATCH: dataclasses.replace(BATCH_SIZE, default=512),
}
"""The maxima are beyond any model, and still answered in a time that one waits."""
EXAMPLE = "layers=24 width=2304 heads=24"


def gpt_source(words: Sequence[str]) -> tuple[str, FactsSource]:
    """The facts of the GPT that the words describe, and what to call it: a recipe among them is for the ask.

    Raises FourfoldError.
    """
    from fourfold.planner.predict.gpt_facts import GptFacts

    others, given, problems = read_words([word for word in words if not word.startswith(RECIPE_PREFIX)], GPT_FIELDS)
    values = {name: each.default for name, each in GPT_FIELDS.items()} | given
    problems += [Problem(word, "KEY=VALUE after gpt", EXAMPLE) for word in others if word != GPT]
    if missing := [name for name, value in values.items() if value is dataclasses.MISSING]:
        problems.append(Problem(f"a gpt without {' and '.join(missing)}", "its size", EXAMPLE))
    if problems:
        raise SettingError(problems, where=WHERE)
    try:
        source = GptFacts(**values)
    except PlanError as error:
        raise SettingError(error.problems, where=WHERE) from None
    return f"gpt of {values['layers']} layers, width {values['width']:,}", source
