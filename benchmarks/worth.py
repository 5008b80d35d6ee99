"""Is the covariance worth having? The small CenterPoint on simulated LiDAR; docs/quality.md has the commands and what came out.

python benchmarks/worth.py fit     --out OUT    # posteriors from 1, 10 and 100 frames
python benchmarks/worth.py predict --out OUT    # boxes of clear and shifted frames with covariances by part of the network; goes on where it was cut off
python benchmarks/worth.py report  --out OUT    # tables from what the steps before wrote
"""

from __future__ import annotations

import argparse
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import torch

from boxcov import MCGLM, MCI, Detections, ExactGLM, Posterior, fit
from boxcov.data import simulated
from boxcov.detectors import centerpoint

SHARES = {"1 %": 1, "10 %": 10, "100 %": 100}  # frames behind each posterior
N_TRAIN = 3500  # what 100 % of the frames stand for
SHIFTS = ("rain", "fog", "sparse", "unseen")
KNOWN = 40  # training frames whose features are what the Mahalanobis distance is from


def main() -> None:
    steps = {"fit": fit_posteriors, "predict": predict, "report": report}
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("step", choices=steps)
    parser.add_argument("--out", type=Path, required=True, help="folder for all that is written")
    parser.add_argument("--clear", type=int, default=120, help="clear frames")
    parser.add_argument("--shifted", type=int, default=20, help="frames of each shift, and clear ones that they are told from")
    parser.add_argument("--samples", type=int, default=24, help="directions of MC-GLM through the backbone")
    parser.add_argument("--prior", type=float, default=100.0, help="prior precision")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--threads", type=int, default=1)
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    warnings.simplefilter("ignore")
    given.out.mkdir(parents=True, exist_ok=True)
    steps[given.step](given)


# what is measured


def fit_posteriors(given: argparse.Namespace) -> None:
    detector = centerpoint.load("small").to(given.device)
    for name, count in SHARES.items():
        path = given.out / f"posterior {name}.safetensors"
        if not path.exists():
            frames = simulated.frames("clear", seed=0, count=count, device=given.device)
            n = N_TRAIN * count / SHARES["100 %"]
            fit(detector, frames, depth="backbone", n_data=n, prior_precision=given.prior).save(path)
            print(path, flush=True)


def predict(given: argparse.Namespace) -> None:
    """One file a frame: boxes, their covariances with the logit of the score as the last number, their features, and the objects."""
    detector = centerpoint.load("small").to(given.device)
    whole = Posterior.load(given.out / "posterior 100 %.safetensors", detector)
    models: dict[str, Any] = {"head": ExactGLM(detector, part(whole, "head"), score=True)}
    models["backbone"] = MCGLM(detector, part(whole, "backbone"), given.samples, score=True)
    models["dropout"] = MCI(detector, dropout=0.1, samples=10, depth="backbone", score=True)
    for name in ("1 %", "10 %"):
        models[f"head {name}"] = ExactGLM(detector, part(Posterior.load(given.out / f"posterior {name}.safetensors", detector), "head"))
    for scenario, number in order(given):
        path = given.out / f"{scenario} {number}.npz"
        if path.exists():
            continue
        seed = 0 if scenario == "train" else 1000
        inputs, targets = simulated.frames("clear" if scenario == "train" else scenario, seed=seed, count=number + 1, device=given.device)[
            number
        ]
        made = {"features": features_at(detector, inputs), "points": np.array(sum(len(cloud) for cloud in inputs))}
        made |= {name: targets[0][key].cpu().numpy() for name, key in (("objects", "boxes"), ("object labels", "labels"))}
        found = detector.detect(inputs)
        made |= {name: getattr(found, name).cpu().numpy() for name in ("boxes", "scores", "labels")}
        for name, model in models.items():
            if wanted(name, scenario, number, given):
                made[name] = with_logit(model(inputs))
        np.savez_compressed(path, **made)
        print(path.name, len(found), flush=True)


def order(given: argparse.Namespace) -> list[tuple[str, int]]:
    first = [("clear", i) for i in range(2 * given.shifted)] + [(shift, i) for i in range(given.shifted) for shift in SHIFTS]
    rest = [("clear", i) for i in range(2 * given.shifted, given.clear)]
    return [("train", i) for i in range(KNOWN)] + first + rest


def wanted(name: str, scenario: str, number: int, given: argparse.Namespace) -> bool:
    """Of training frames the features are enough; dropout and posteriors of few frames are for the frames of the shifts."""
    if scenario == "train":
        return False
    return name in ("head", "backbone") or (number < given.shifted and (name == "dropout" or scenario == "clear"))


def part(posterior: Posterior, name: str) -> Posterior:
    return posterior.restricted([block for block in posterior.blocks if block.startswith(f"{name}.")])


def features_at(detector: centerpoint.CenterPoint, inputs: Any) -> np.ndarray:
    """What the neck says at the cell of each box (m, channels)."""
    with torch.no_grad():
        raw = detector(inputs)
        where = detector.select(raw).where
        features: np.ndarray = raw["features"][where.frame, :, where.row, where.column].cpu().numpy().astype(np.float16)
    return features


def with_logit(found: Detections) -> np.ndarray:
    """The covariances (m, D + 1, D + 1) with the logit as the last number, or (m, D, D) without."""
    C = found.covariance
    if found.score_variance is not None:
        side = found.score_covariance[:, :, None]
        C = torch.cat([torch.cat([C, side], 2), torch.cat([side.mT, found.score_variance[:, None, None]], 2)], 1)
    return C.cpu().numpy().astype(np.float32)


def report(given: argparse.Namespace) -> None:
    raise NotImplementedError


if __name__ == "__main__":
    main()
