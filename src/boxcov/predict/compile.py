"""``boxcov.compile``: a model for deployment, which runs a frame as one CUDA graph."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any
from warnings import warn

import torch
from torch import Tensor

from boxcov._torch.modules import check_device, fresh, move, ready, shadow
from boxcov._torch.process_state import ProcessLock
from boxcov._torch.snapshot import ModuleSnapshot, WeightChecksum
from boxcov.detections import Detections
from boxcov.detector import Detector
from boxcov.errors import BoxcovError, BoxcovWarning, check_instance, counted
from boxcov.predict.cuda.static_graph import CaptureError, Graphs, backend_flags
from boxcov.predict.exact import ExactGLM
from boxcov.predict.mcglm import MCGLM
from boxcov.predict.predictor import Predictor
from boxcov.predict.route.verification import relative_errors
from boxcov.predict.static_frame import FrameFunction, WithSignals
from boxcov.static_selection import FusedNetwork, StaticLimits

_TOLERANCE = 1e-2  # relative difference of a covariance on the example: TF32 products
_ALIKE = 0.05  # distance of two centres, in units of the box, that rounding explains
_SHARE_ALIKE = 0.9  # of the example's boxes: rounding can change which boxes NMS keeps
_CHANGED = (
    "the detector's weights or settings have changed since boxcov.compile(fused=True): "
    "compile it again"
)
_MAX_GRAPHS = 4
_CALLS = 16  # within which changed weights of a plain detector are noticed
_TENSORS = tuple(field.name for field in fields(Detections) if "Tensor" in str(field.type))


def compile(
    model: Detector | ExactGLM | MCGLM,
    example: Any,
    limits: StaticLimits | None = None,
    *,
    fused: bool = False,
) -> CompiledModel:
    """Return the model as an object that runs each frame in a few launches.

    Everything after the detector's encoder (network, selection, decoding, covariance and error
    model) is captured as one CUDA graph of fixed shapes; the first call is as fast as the others.
    The boxes are those of the model bit for bit. A plain detector is compiled without covariances.

    example: inputs like those of later calls; its batch size is fixed. limits: of boxes and
    candidates per call; a frame beyond them is computed by the model itself, with one warning.
    On a CPU there is no graph: the same function runs step by step, which is slower.

    fused: run the detector's fused network, encoder included. It has batch norms folded into
    convolutions, so the boxes equal those of the model up to rounding; they are the same bit for
    bit with and without covariances.

    >>> import boxcov
    >>> from boxcov.data import shapes
    >>> from boxcov.detectors.tiny import TinyCenter
    >>> frames = shapes.frames(count=2)
    >>> detector = TinyCenter(threshold=0.05, most=3).eval()
    >>> model = boxcov.ExactGLM(detector, boxcov.fit(detector, frames))
    >>> fast = compile(model, frames[0][0])
    >>> torch.equal(fast(frames[1][0]).boxes, model(frames[1][0]).boxes)
    True
    """
    return CompiledModel(model, example, limits, fused=fused)


class CompiledModel:
    """A model with fixed shapes: ``compiled(inputs)`` returns ``Detections``. See ``compile``.

    Calls from several threads wait for each other.
    """

    def __init__(
        self,
        model: Detector | ExactGLM | MCGLM,
        example: Any,
        limits: StaticLimits | None = None,
        *,
        fused: bool = False,
    ) -> None:
        if not isinstance(model, Detector):
            _check_method(model)  # before the work
        self.model, self.limits = model, StaticLimits(boxes=256) if limits is None else limits
        check_instance("limits", self.limits, StaticLimits)
        self._plain = model.detect if isinstance(model, Detector) else model
        self.fallbacks = 0  # frames that the model itself had to compute
        self._detector = model if isinstance(model, Detector) else model._detector
        self.device = next(self._detector.parameters()).device
        self._lock = ProcessLock()
        self._graphs = Graphs(_MAX_GRAPHS) if self.device.type == "cuda" else None
        self._rows: Detections | None = None  # of the last run of the function, for its metadata
        self.network: FusedNetwork | None = None
        with torch.inference_mode(False), torch.no_grad():
            example = ready(example, self.device)
            given = self._static_inputs(example)
            self._snapshot = self._watch(example)
            self.function = self._build(given)
            if fused:
                self._fuse(example)
                given = self._static_inputs(example)
            self._shape = given[0].shape
            for _ in range(3):  # a first call, the capture, and a replay
                found = self._run(given, example)
        self._verify(found, example)

    def __call__(self, inputs: Any) -> Detections:
        """The detections of ``model(inputs)``, or of ``detector.detect(inputs)``."""
        with self._lock, torch.inference_mode(False), torch.no_grad():
            if self.network is None:
                check_device(self._detector, self.device, "boxcov.compile")
                inputs = ready(inputs, self.device)
            else:  # it finds values that are not finite inside the graph
                inputs = move(inputs, self.device)
            given = self._static_inputs(inputs)
            fits = bool(given) and given[0].shape == self._shape
            found = self._run(given, inputs) if fits else None
        if found is not None:
            return found
        return self._fall_back(inputs, given[0].shape if given else None)

    def __repr__(self) -> str:
        inner = repr(self.model) if isinstance(self.model, Predictor) else type(self.model).__name__
        return f"CompiledModel({self.limits}, inputs {tuple(self._shape)}) of\n{inner}"

    def _static_inputs(self, inputs: Any) -> tuple[Tensor, ...]:
        """What the graph reads; nothing if the inputs are beyond the limits of a fused network."""
        if self.network is not None:
            return self.network.pack(inputs) or ()
        given = self._detector.static_inputs(fresh(inputs))
        if given is None:
            raise BoxcovError(
                f"{type(self._detector).__name__}.static_inputs() returned None: boxcov.compile "
                "needs a subclass of boxcov.Detector in which it returns the tensor that the "
                "network reads"
            )
        has_signals = isinstance(self.model, Predictor) and self.model.error_model is not None
        extra = self._detector.signal_inputs(inputs) if has_signals else None
        return (given,) if extra is None else (given, extra)

    def _fuse(self, example: Any) -> None:
        """Let the function run the detector's fused network from now on."""
        self.network = self._detector.fused_network(example)
        if self.network is None:
            raise BoxcovError(
                f"{type(self._detector).__name__} has no fused_network(): leave out fused=True"
            )
        self.function.use_network(self.network)
        self._checksum = WeightChecksum(self._detector, _CALLS)  # its weights are copies

    def _check_weights(self) -> Tensor | None:
        """A flag on the device whether a share of the weights is unchanged; raise if they changed.

        None for a plain detector whose graph reads its weights.
        """
        if self.network is not None and not self._snapshot.is_unchanged():
            raise BoxcovError(_CHANGED)
        if isinstance(self.model, Predictor):
            return self.model.check_weights()
        return None if self.network is None else self._checksum.next_share()

    def _build(self, given: tuple[Tensor, ...]) -> FrameFunction:
        part, model = self._detector.static_part(), self.model
        if isinstance(model, Detector):
            return FrameFunction(part, None, _join(given), self.limits)
        posterior = model.posterior.with_error_model(model.error_model)
        etas = model.etas if isinstance(model, MCGLM) else None
        return FrameFunction(part, posterior, _join(given), self.limits, etas, model.engine)

    def _run(self, given: tuple[Tensor, ...], inputs: Any) -> Detections | None:
        """The detections; None if the frame is beyond the limits. inputs: as they came."""
        floats, indices, flags = self._replay(given, inputs)
        is_current = self._check_weights()  # while the device computes
        if is_current is not None:
            flags = torch.cat([flags, is_current.long().unsqueeze(0)])
        count, left_off, *holds = flags.tolist()  # the one synchronisation with the device
        if left_off:
            return None
        found = self._unpack(floats[:count].clone(), indices[:count].clone())
        if not all(holds):
            ready(inputs, self.device)  # raises if they are not finite
            if not isinstance(self.model, Predictor):
                raise BoxcovError(_CHANGED)
            self.model.check(found, torch.tensor(True) if is_current is None else is_current)
        return found

    def _watch(self, inputs: Any) -> ModuleSnapshot:
        """A snapshot of the detector; attributes that a frame writes, such as a cache, may change.

        inputs: of a frame, which a shadow computes to tell these attributes.
        """
        twin = shadow(self._detector)
        snapshot = ModuleSnapshot(self._detector, twin)
        twin.static_inputs(fresh(inputs))
        twin.detect(fresh(inputs))
        return snapshot

    def _replay(self, given: tuple[Tensor, ...], inputs: Any) -> tuple[Tensor, ...]:
        """What ``_compute`` returns, as a CUDA graph where there is one."""
        if self.network is None and not self._snapshot.is_unchanged():
            # the function knows weights by their tensors, and a graph reads their memory
            self.function, self._snapshot = self._build(given), self._watch(inputs)
            self._graphs = None if self._graphs is None else Graphs(_MAX_GRAPHS)
        if self._graphs is None:
            return self._compute(*given)
        try:
            return self._graphs(backend_flags(), self._compute, *given)
        except RuntimeError as error:
            if not self._graphs.capturing:
                raise
            raise CaptureError(
                f"{type(self._detector).__name__} cannot be captured as a CUDA graph: "
                f"{str(error).splitlines()[0]}"
            ) from error

    def _compute(self, *given: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """All numbers of the detections side by side (n, columns), those that are integers, flags.

        The flags are the number of boxes, the number left off, whether the inputs are finite, and
        whether all results are in range.
        """
        found, static = self.function.run(_join(given) if self.network is None else given)
        self._rows = found
        holds = is_finite = static.count >= 0
        if self.network is not None:
            is_finite = given[0].isfinite().all()
        if isinstance(self.model, Predictor) and found.covariance is not None:
            holds = (self.model.rows_in_range(found) | ~static.valid).all()
            found.covariance.diagonal(dim1=1, dim2=2).clamp_(min=0)  # -1e-16 by rounding
        flags = [static.count, static.left_off, is_finite.long(), holds.long()]
        columns = [tensor.reshape(len(found), -1) for tensor in self._tensors(True).values()]
        # one copy per frame instead of one per field
        indices = torch.stack(list(self._tensors(False).values()), 1)
        return torch.cat(columns, 1), indices, torch.stack(flags)

    def _tensors(self, is_float: bool) -> dict[str, Tensor]:
        """The tensors of the last rows that are numbers, or that are integers, by name."""
        tensors = {name: getattr(self._rows, name) for name in _TENSORS}
        return {
            name: value
            for name, value in tensors.items()
            if value is not None and value.is_floating_point() == is_float
        }

    def _unpack(self, floats: Tensor, indices: Tensor) -> Detections:
        """The detections of a frame, from the rows of its boxes."""
        rows = self._tensors(True)
        own: dict[str, Any] = dict(zip(self._tensors(False), indices.unbind(1)))
        parts = floats.split([row.shape[1:].numel() for row in rows.values()], 1)
        for (name, row), part in zip(rows.items(), parts):
            own[name] = part.reshape(len(part), *row.shape[1:]).to(row.dtype)
        assert self._rows is not None
        settings = {} if isinstance(self.model, Detector) else self.model.settings()
        return replace(self._rows, **own, meta={**settings, **self._rows.meta})

    def _fall_back(self, inputs: Any, shape: torch.Size | None) -> Detections:
        """The model's own detections, for a frame that the graph cannot hold."""
        if not self.fallbacks:
            reason = f"it has more boxes or candidates than {self.limits}"
            if shape is None:
                reason = "it has more points than the fused network holds, or other frames"
            elif shape != self._shape:
                reason = f"its inputs have the shape {tuple(shape)}, not {tuple(self._shape)}"
            warn(
                f"a frame is computed without the compiled graph, because {reason}; "
                "CompiledModel.fallbacks counts further ones",
                BoxcovWarning,
                stacklevel=3,
            )
        self.fallbacks += 1
        return self._plain(inputs)

    def _verify(self, found: Detections | None, example: Any) -> None:
        """Raise if the example is beyond the limits, or differs from what the model computes."""
        expected = self._plain(example)
        if found is None:
            raise BoxcovError(
                f"the example with {counted(len(expected), 'box')} is beyond {self.limits}: "
                "pass larger limits to boxcov.compile"
            )
        same = torch.equal(found.boxes, expected.boxes)
        if self.network is not None:
            same = _share_alike(found, expected) >= _SHARE_ALIKE
        is_comparable = same and len(found) == len(expected)
        if is_comparable and expected.covariance is not None and found.covariance is not None:
            errors = relative_errors(found.covariance, expected.covariance)
            same = not len(errors) or float(errors.median()) <= _TOLERANCE
        if same:
            return
        difference = f"{len(found)} boxes, not {len(expected)}"
        if len(found) == len(expected):
            difference = (
                f"boxes differ by up to {float((found.boxes - expected.boxes).abs().max()):.1g}"
            )
        raise BoxcovError(
            f"{type(self._detector).__name__} gives other boxes or covariances as a static graph "
            f"than by itself ({difference}): does select_static() report what select() does, in "
            "the same order?"
        )


def _join(given: tuple[Tensor, ...]) -> Any:
    """Inputs of a static part."""
    return given[0] if len(given) == 1 else WithSignals(*given)


def _share_alike(found: Detections, expected: Detections) -> float:
    """Share of the expected boxes that have one with the same label in about the same place."""
    if not len(expected) or not len(found):
        return float(len(expected) == len(found))
    apart = torch.cdist(expected.boxes[:, :2].double(), found.boxes[:, :2].double())
    others = expected.labels.unsqueeze(1) != found.labels
    return float((apart.masked_fill(others, torch.inf).amin(1) < _ALIKE).double().mean())


def _check_method(model: ExactGLM | MCGLM) -> None:
    if not isinstance(model, ExactGLM | MCGLM):
        raise BoxcovError(
            f"boxcov.compile takes ExactGLM or MCGLM, not {type(model).__name__}, or a "
            "boxcov.Detector without covariances"
        )
    options = {
        "with_logit=True": model.with_logit,
        "derivative='fd'": isinstance(model, MCGLM) and model.derivative == "fd",
        "samples below the head": isinstance(model, ExactGLM) and model.samples is not None,
    }
    wrong = [name for name, is_used in options.items() if is_used]
    if wrong:
        raise BoxcovError(f"boxcov.compile does not support {', '.join(wrong)}")
