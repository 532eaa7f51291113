"""Pipelines with closed-form answers, faults and leak checks: for OmniStage's tests and for users' own."""
