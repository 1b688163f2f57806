"""Hostile inputs for HELM: generators that mutate valid ones, a watched runner, an oracle each."""
