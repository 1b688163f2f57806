"""Clients that leave, stall, lie and come too many, against `helm-llm serve` as a process."""
