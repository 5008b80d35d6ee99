"""How ``model(inputs)`` computes a frame: the only place that chooses between engines.

``base.py`` runs the plain pass, and is all that an estimator without a choice (GLM) needs.
``exact.py``, ``mcglm.py`` and ``mci.py`` hold the router of one estimator each. A router holds one
``Verification`` per fast engine (``verification.py``; that of ``instances()`` in ``instances.py``)
and chooses among the engines on the first boxes:

==========================  ====================================================================
engine                      verified against
==========================  ====================================================================
``InstanceEngine``          ``decode()``: equal boxes, equal gradients
``StagedHead``, exact       ``InstanceEngine``, for every kind of box
``StagedHead``, MCGLM       vmap(jvp), for every kind of box
``TangentPropagation``      vmap(jvp)
``StaticGraph``             the plain pass, bit for bit
==========================  ====================================================================

Autograd and vmap(jvp) work for any detector; they are the oracles and need no verification. An
engine starts UNVERIFIED. It becomes VERIFIED when it agrees with its oracle. Its result is used for
that frame and all later ones, so a frame gives the same result whether it comes first or later. A
new kind of box (another task or level) is verified when it first appears. In every frame, the boxes
of stages (on a CPU) and instances are compared with the plain ones: those that differ are an error,
or, where the instances are right and stages alone are wrong, computed without stages.

With ``precision="tf32"`` tangents are in float16 (``forward_mode/storage.py``). If they contradict
their oracle, which is then in float32, or a covariance is not finite, one warning is given, and
tangents in float32 are verified in their place.

An engine that becomes REFUSED is replaced by its oracle. That happens without a warning where the
engine is not available: the detector has no such method, or the network uses an operation that the
engine has no rule for. One warning is given where propagated tangents contradict their oracle, or
where a CUDA graph does or cannot be captured. Stages or instances that contradict their oracle are
an error of the detector: ``BoxcovError``.

By rounding, an activation at its kink (ReLU at zero) may fall to either side, which changes a box's
derivatives by some per cent. A few boxes that differ are therefore no contradiction, and few boxes,
of a frame or of a kind, decide nothing unless the difference is far beyond rounding: the oracle's
numbers are then returned, and the next frame is compared again.

The route is logged when it is fixed (logger "boxcov", level INFO) and shown by ``repr(model)``.
"""
