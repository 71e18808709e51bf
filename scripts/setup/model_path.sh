#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Print the folder of a model that `make models` built: scripts/setup/model_path.sh tiny-llama
exec python3 "$(dirname "${BASH_SOURCE[0]}")/../../tests/support/cpu_env.py" model "$@"
