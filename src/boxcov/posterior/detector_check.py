"""Does a posterior belong to a detector?"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from warnings import warn

from boxcov._torch.modules import check_fingerprint
from boxcov.configuration import describe_differences, of_network
from boxcov.detector import Detector
from boxcov.errors import BoxcovError, BoxcovWarning
from boxcov.input_file import conform
from boxcov.posterior.posterior import Posterior


def check_detector(posterior: Posterior, detector: Detector, context: str = "posterior") -> None:
    """Raise if a posterior was fitted to other weights, or under another configuration."""
    check_fingerprint(posterior.fingerprint, detector, context)
    if posterior.configuration:
        _check_configuration(posterior.configuration, detector, context)


def check_header(about: Mapping[str, Any], detector: Detector, path: str) -> None:
    """Raise if the header of a file belongs to another detector; warn if it does not say."""
    check_fingerprint(about["weights_sha256"], detector, path)
    if "configuration" in about:
        saved = conform(about["configuration"], dict[str, str], "configuration")
        _check_configuration(saved, detector, path)
        return
    own = set(of_network(detector.configuration())) - set(Detector.configuration(detector))
    if own:
        warn(
            f"{path}: an older boxcov wrote it and did not store the configuration of the detector "
            f"({', '.join(sorted(own)[:3])} ...): make sure that it is the one of the fit, and "
            "save the posterior again",
            BoxcovWarning,
            stacklevel=4,
        )


def _check_configuration(saved: Mapping[str, str], detector: Detector, context: str) -> None:
    current = detector.configuration()
    if differences := describe_differences(of_network(saved), of_network(current)):
        raise BoxcovError(
            f"{context}: this posterior was fitted under another configuration ({differences}): "
            "load the detector with that configuration, or fit a new posterior"
        )
