"""Built on jaxkv: a small engine, measurements, replays of traces, a doctor."""
