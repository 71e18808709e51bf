# SPDX-License-Identifier: Apache-2.0
"""Generated messages, stub and servicer of the package `openengine.v1`.

Each `<domain>_pb2` module holds the messages of `proto/openengine/v1/<domain>.proto`; `service_pb2_grpc`
holds the stub and the servicer. `scripts/generate_bindings.py` writes all of them.
"""
