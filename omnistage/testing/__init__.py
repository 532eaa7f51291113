"""Pipelines with closed-form answers, faults and leak checks: for OmniStage's tests and for users' own."""

from __future__ import annotations

from omnistage.testing.stagebench import Example
from omnistage.testing.stagecheck import BrokenPromise, check_stage

__all__ = ["BrokenPromise", "Example", "check_stage"]
