"""Timelines for other programs: Chrome trace files, OpenTelemetry."""
