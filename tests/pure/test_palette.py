"""Laws of the page's colours: told apart in normal, deutan and protan vision, on light and on dark."""

import itertools
import re

import numpy as np
import pytest

from fourfold.report import document, plan_pages, step_timeline
from fourfold.words.program import Verb

PAGE = document.PAGE.read_text(encoding="utf-8")
BOTH = re.findall(r":root \{.*?\}", PAGE, re.DOTALL)
LIGHT, DARK = (dict(re.findall(r"--([a-z-]+): (#[0-9a-f]{6})", colours)) for colours in BOTH)
DRAWN = [name.removeprefix("on-") for name in LIGHT if name.startswith("on-")]
CURVES = re.findall(r"\w+", PAGE.partition("CURVES = [")[2].partition("]")[0])
# Full dichromacy on linear RGB: Machado, Oliveira & Fernandes, "A physiologically-based model for simulation of color
# vision deficiency", 2009, table 1.
DEUTAN = np.array([[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]])
PROTAN = np.array([[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]])
VISIONS = {"normal": np.eye(3), "deutan": DEUTAN, "protan": PROTAN}
# Björn Ottosson, "A perceptual color space for image processing", 2020.
TO_LMS = np.array([
    [0.4122214708, 0.5363325363, 0.0514459929],
    [0.2119034982, 0.6806995451, 0.1073969566],
    [0.0883024619, 0.2817188376, 0.6299787005],
])  # fmt: skip
TO_LAB = np.array([
    [0.2104542553, 0.7936177850, -0.0040720468],
    [1.9779984951, -2.4285922050, 0.4505937099],
    [0.0259040371, 0.7827717662, -0.8086757660],
])  # fmt: skip
LEAST_DISTANCE, LEAST_CURVE_CONTRAST, LEAST_TEXT_CONTRAST = 0.09, 3.0, 4.5
SCHEMES = pytest.mark.parametrize("colours", [LIGHT, DARK], ids=["light", "dark"])


def linear(colour: str) -> np.ndarray:
    channels = np.array([int(colour[at : at + 2], 16) for at in (1, 3, 5)]) / 255
    return np.where(channels <= 0.04045, channels / 12.92, ((channels + 0.055) / 1.055) ** 2.4)


def oklab(rgb: np.ndarray) -> np.ndarray:
    return TO_LAB @ np.cbrt(TO_LMS @ np.clip(rgb, 0, 1))


def contrast(one: str, other: str) -> float:
    low, high = sorted(float(np.array([0.2126, 0.7152, 0.0722]) @ linear(colour)) for colour in (one, other))
    return (high + 0.05) / (low + 0.05)


@SCHEMES
@pytest.mark.parametrize("vision", VISIONS)
def test_what_is_drawn_together_is_told_apart(colours, vision):
    seen = {name: oklab(VISIONS[vision] @ linear(colours[name])) for name in DRAWN}
    seen["card"] = oklab(VISIONS[vision] @ linear(colours["card"]))
    near = {
        (one, other): round(float(np.linalg.norm(seen[one] - seen[other])), 3)
        for one, other in itertools.combinations(seen, 2)
        if np.linalg.norm(seen[one] - seen[other]) < LEAST_DISTANCE
    }
    assert near == {}


@SCHEMES
def test_curves_stand_out_from_the_card(colours):
    assert min(contrast(colours[name], colours["card"]) for name in CURVES) >= LEAST_CURVE_CONTRAST


@SCHEMES
def test_texts_are_legible(colours):
    pairs = [(f"on-{name}", name) for name in DRAWN] + [("ink", "card"), ("muted", "card"), ("muted", "paper")]
    too_faint = {pair for pair in pairs if contrast(colours[pair[0]], colours[pair[1]]) < LEAST_TEXT_CONTRAST}
    assert too_faint == set()


def test_both_schemes_define_the_same_colours_and_every_verb_and_term_has_one():
    assert set(LIGHT) == set(DARK)
    assert set(step_timeline.VERB_STYLES) == set(Verb)
    styles = {*step_timeline.VERB_STYLES.values(), *plan_pages.TERM_STYLES.values()}
    assert styles | {style for _, style in plan_pages.STYLES.values()} <= set(DRAWN)
    assert {*step_timeline.BAR_STYLES.values(), *CURVES} <= set(LIGHT)
