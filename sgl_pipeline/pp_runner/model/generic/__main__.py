"""`python -m sgl_pipeline.pp_runner.model.generic PATH` prints the spec of a model directory as
JSON.

For processes that must not import the code of models. Exit status 2 and one line on stdout: the
probes refuse the model; 1 and one line on stderr: it cannot be read.
"""

import argparse
import sys

from sgl_pipeline.errors import SglPipelineError, UnsupportedModelError
from sgl_pipeline.pp_runner.model.generic.probe import probe

FAILED, REFUSED = 1, 2


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("path")
    parser.add_argument("--quantization")
    options = parser.parse_args()
    try:
        spec = probe(options.path, options.quantization)
    except UnsupportedModelError as error:
        print(" ".join(str(error).split()))
        return REFUSED
    except SglPipelineError as error:
        print(" ".join(str(error).split()), file=sys.stderr)
        return FAILED
    print(spec.to_json())
    return 0


if __name__ == "__main__":
    sys.exit(main())
