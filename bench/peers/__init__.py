"""The engines that HELM is measured beside, HELM behind the same calls, and their processes."""
