"""The Prometheus sink: a collector, a renderer that spares the trainer's GIL, and the HTTP endpoint.

The monitor opens the endpoint like this, with ``read`` returning the latest Snapshot::

    endpoint = Endpoint(read, host="0.0.0.0", port=10420, first_alternate=10428, max_series=2000,
                        on_failure=fence.record)
    endpoint.start()        # EndpointError if no port can be had
    endpoint.url            # http://localhost:10420
    endpoint.close()
"""

from gradexporter.sinks.prometheus.collector import PrometheusCollector
from gradexporter.sinks.prometheus.connection import Limits
from gradexporter.sinks.prometheus.server import Endpoint, EndpointError

__all__ = ["Endpoint", "EndpointError", "Limits", "PrometheusCollector"]
