"""Makes sglang importable here, as every process of the server does before it imports it."""

import importlib.util

if importlib.util.find_spec("sglang") is None:
    collect_ignore_glob = ["test_*.py"]  # `make test` installs it; a bare checkout may lack it
else:
    from sgl_pipeline.managers.torchvision_shim import install_torchvision_shim

    install_torchvision_shim()
