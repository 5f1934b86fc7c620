"""What the rooms of a stage share: inputs of a step, KV formats, copies to the host, threads."""
