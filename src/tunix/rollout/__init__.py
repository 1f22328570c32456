"""Playing a policy in an environment: episode runner, collector, publication."""
