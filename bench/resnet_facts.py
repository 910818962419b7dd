"""ResNet-50 facts: the network of He et al. by formula, so that training on ImageNet can be priced without a model.

stem         the first end: a convolution of 7 × 7 and a pooling, each halves the image
bottleneck   a block: convolutions of 1 × 1, 3 × 3 (it may halve the image) and 1 × 1, and a shortcut around them
normalized   each convolution has a batch normalization behind it, and all but the last of a block a ReLU
Law: 25,557,032 parameters, and 4.09 billion multiplications forward for an image of 224 × 224.

Sources: He et al. (1512.03385), table 1; the image is halved in the 3 × 3, as in Goyal et al. (1706.02677).
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple, Self

from fourfold.axes.pipeline.rules.division import divide, division_problems, stage_names
from fourfold.plan.model_traits import ModelTraits
from fourfold.plan.param_spec import ParamSpec, UpdateSpec
from fourfold.plan.plan import Plan
from fourfold.plan.precision import COMPUTE_FORMATS
from fourfold.planner.predict.facts import ModelFacts, Operation, OperationKind, SegmentFacts
from fourfold.words.errors import PlanError, Problem

BLOCKS = ((3, 64), (4, 128), (6, 256), (3, 512))
"""By size of the image: how many bottlenecks, and their inner channels."""
EXPANSION, STEM_CHANNELS, CLASSES = 4, 64, 1000
FLOAT32_BYTES = 4
MOMENTUM = UpdateSpec(optimizer="SGD", num_states=(1,))
NORMS = ModelTraits(batch_norms=("bn1", "layer1.0.bn1", "layer1.0.bn2", "layer1.0.bn3"))


class Convolution(NamedTuple):
    """A convolution of `kernel` × `kernel` whose output has `size` × `size` places, and the normalization behind it."""

    name: str
    inputs: int
    outputs: int
    kernel: int
    size: int
    stride: int = 1

    @property
    def num_weights(self) -> int:
        return self.inputs * self.outputs * self.kernel**2

    @property
    def input_elements(self) -> int:
        return self.inputs * (self.size * self.stride) ** 2

    @property
    def output_elements(self) -> int:
        return self.outputs * self.size**2

    def operation(self, element_bytes: int) -> Operation:
        return Operation(
            OperationKind.CONVOLUTION,
            flops=2.0 * self.num_weights * self.size**2,
            moved_bytes=float(element_bytes * (self.input_elements + self.output_elements)),
            weight_bytes=float(element_bytes * self.num_weights),
            has_weight=True,
        )

    def shapes(self) -> dict[str, tuple[int, ...]]:
        norm = self.name.replace("conv", "bn").replace("downsample.0", "downsample.1")
        weights = (self.outputs, self.inputs, self.kernel, self.kernel)
        return {f"{self.name}.weight": weights, f"{norm}.weight": (self.outputs,), f"{norm}.bias": (self.outputs,)}


class Bottleneck(NamedTuple):
    """A block. Its last convolution is that of the shortcut, if that has one."""

    name: str
    convolutions: tuple[Convolution, ...]

    @property
    def output(self) -> Convolution:
        return self.convolutions[2]


def bottlenecks(image: int) -> Iterator[Bottleneck]:
    channels, size = STEM_CHANNELS, image // 4
    for layer, (count, width) in enumerate(BLOCKS, 1):
        for index in range(count):
            name, stride = f"layer{layer}.{index}", 2 if layer > 1 and index == 0 else 1
            inner, size, outputs = size, size // stride, EXPANSION * width
            convolutions = [
                Convolution(f"{name}.conv1", channels, width, 1, inner),
                Convolution(f"{name}.conv2", width, width, 3, size, stride),
                Convolution(f"{name}.conv3", width, outputs, 1, size),
            ]
            if index == 0:
                convolutions.append(Convolution(f"{name}.downsample.0", channels, outputs, 1, size, stride))
            yield Bottleneck(name, tuple(convolutions))
            channels = outputs


@dataclass(frozen=True, kw_only=True)
class ResNetFacts:
    """A `FactsSource` for data parallelism and pipelines. `image`: pixels of a side, divisible by 32."""

    batch_size: int
    image: int = 224
    update_spec: UpdateSpec = MOMENTUM
    traits: ModelTraits = NORMS
    _facts: dict[str, ModelFacts] = field(default_factory=dict, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if type(self.image) is not int or self.image < 32 or self.image % 32:
            problem = Problem(f"image = {self.image!r}", "a number of pixels divisible by 32", "image = 224")
            raise PlanError(problem, where="the ResNet")

    @property
    def num_parameters(self) -> int:
        return sum(spec.num_elements for spec in self.specs(Plan()))

    @property
    def blocks(self) -> tuple[Bottleneck, ...]:
        return tuple(bottlenecks(self.image))

    @property
    def stem(self) -> Convolution:
        return Convolution("conv1", 3, STEM_CHANNELS, 7, self.image // 2, 2)

    # ---- FactsSource ----------------------------------------------------------------------------------

    def resized(self, batch_size: int) -> Self:
        return replace(self, batch_size=batch_size)

    def facts(self, plan: Plan) -> ModelFacts:
        if problems := _axis_problems(plan):
            raise PlanError(problems, where="the plan")
        compute = COMPUTE_FORMATS.get(plan.precision)
        element_bytes = compute.num_bytes if compute else FLOAT32_BYTES
        if plan.precision not in self._facts:
            self._facts[plan.precision] = self._make_facts(element_bytes)
        return self._facts[plan.precision]

    def specs(self, plan: Plan) -> Sequence[ParamSpec]:
        shapes = {name: (shape, 0) for name, shape in self.stem.shapes().items()}
        for stage, indexes in enumerate(self.stage_blocks(plan)):
            for index in indexes:
                for convolution in self.blocks[index].convolutions:
                    shapes |= {name: (shape, stage) for name, shape in convolution.shapes().items()}
        last = plan.num_stages - 1
        shapes |= {"fc.weight": ((CLASSES, self._features), last), "fc.bias": ((CLASSES,), last)}
        return [
            ParamSpec(name, shape, "float32", FLOAT32_BYTES, stage=stage) for name, (shape, stage) in shapes.items()
        ]

    def stage_blocks(self, plan: Plan) -> tuple[range, ...]:
        problems = division_problems(plan.stages, len(self.blocks), plan.num_stages)
        if stage_names(plan.stages) is not None:
            problems.append(Problem(f"stages = {plan.stages!r}", "counts: blocks of a formula have no names"))
        if problems:
            raise PlanError(problems, where="the plan")
        costs = [float(sum(each.num_weights for each in block.convolutions)) for block in self.blocks]
        return divide(plan.stages, costs, 0.0, float(CLASSES * self._features), plan.num_stages)

    # ---- facts ----------------------------------------------------------------------------------------

    @property
    def _features(self) -> int:
        return EXPANSION * BLOCKS[-1][1]

    def _make_facts(self, e: int) -> ModelFacts:
        return ModelFacts(
            self._first(e),
            tuple(_block(block, e) for block in self.blocks),
            self._last(e),
            # Boundaries differ; the largest stands for all.
            boundary_bytes=float(e * max(block.output.output_elements for block in self.blocks)),
        )

    def _first(self, e: int) -> SegmentFacts:
        stem = self.stem
        pooling = Operation(OperationKind.POINTWISE, 0.0, e * stem.output_elements * 1.25)
        operations = (stem.operation(e), *_normalized(stem, e), pooling)
        kept = float(e * (stem.input_elements + 2.25 * stem.output_elements))
        return SegmentFacts("", tuple(stem.shapes()), operations, _kept(kept), norm_channels=(STEM_CHANNELS,))

    def _last(self, e: int) -> SegmentFacts:
        """The mean over places, the classes, and their cross-entropy."""
        size, features = self.image // 32, self._features
        pooling = Operation(OperationKind.POINTWISE, 0.0, float(e * features * size**2))
        classes = Operation(
            OperationKind.PRODUCT,
            flops=2.0 * features * CLASSES,
            moved_bytes=float(e * (features + CLASSES)),
            weight_bytes=float(e * features * CLASSES),
            has_weight=True,
            rows=1.0,
            columns=CLASSES,
            inner=features,
        )
        loss = Operation(OperationKind.POINTWISE, 0.0, 4.0 * FLOAT32_BYTES * CLASSES)
        kept = float(e * features + FLOAT32_BYTES * CLASSES)
        return SegmentFacts("", ("fc.weight", "fc.bias"), (pooling, classes, loss), _kept(kept))


def _block(block: Bottleneck, e: int) -> SegmentFacts:
    operations = [
        each for convolution in block.convolutions for each in (convolution.operation(e), *_normalized(convolution, e))
    ]
    output = block.output.output_elements
    operations.append(Operation(OperationKind.POINTWISE, 0.0, 3.0 * e * output))  # the sum with the shortcut
    names = tuple(name for convolution in block.convolutions for name in convolution.shapes())
    inputs = float(e * block.convolutions[0].input_elements)
    # Each convolution's output, for its normalization; what the ReLU behind it makes, for the next one.
    kept = inputs + e * sum(2.0 * each.output_elements for each in block.convolutions)
    channels = tuple(each.outputs for each in block.convolutions)
    return SegmentFacts(block.name, names, tuple(operations), _kept(kept, inputs), norm_channels=channels)


def _normalized(convolution: Convolution, e: int) -> tuple[Operation, ...]:
    """A normalization reads its input twice, for statistics and for its output; a ReLU reads and writes."""
    elements = convolution.output_elements
    return tuple(Operation(OperationKind.POINTWISE, 0.0, float(passes * e * elements)) for passes in (3, 2))


def _kept(none: float, inputs: float | None = None) -> dict[str, float]:
    """By `recompute`: an end is never computed again; of a block, `selective` keeps outputs of convolutions."""
    if inputs is None:
        return dict.fromkeys(("none", "selective", "full"), none)
    return {"none": none, "selective": inputs + (none - inputs) / 2, "full": inputs}


def _axis_problems(plan: Plan) -> list[Problem]:
    need = "1: a convolutional network of formulas is divided over samples and layers only"
    return [
        Problem(f"{axis} = {size}", need, f"{axis} = 1") for axis in ("cp", "tp") if (size := getattr(plan, axis)) > 1
    ]
