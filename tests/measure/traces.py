"""Builds XSpace messages for hand-made traces."""

from tensorflow.tsl.profiler.protobuf import xplane_pb2


def space(planes):
    """Makes an XSpace of `{plane: {line: [(name, start_us, end_us, stats), ...]}}`."""
    found = xplane_pb2.XSpace()
    for name, lines in planes.items():
        plane = found.planes.add(name=name)
        names, stats = {}, {}
        for number, (label, events) in enumerate(lines.items()):
            line = plane.lines.add(id=number, name=label, timestamp_ns=5_000_000_000)
            for title, start, end, about in events:
                key = names.setdefault(title, len(names) + 1)
                event = line.events.add(metadata_id=key, offset_ps=start * 10**6, duration_ps=(end - start) * 10**6)
                for stat, value in about.items():
                    kind = "str_value" if isinstance(value, str) else "int64_value"
                    event.stats.add(metadata_id=stats.setdefault(stat, len(stats) + 1), **{kind: value})
        for table, metadata in ((names, plane.event_metadata), (stats, plane.stat_metadata)):
            for title, key in table.items():
                metadata[key].id, metadata[key].name = key, title
    return found


def steps(*spans, kind="train", count=1, eager=False, **more):
    """tfgpu's marks of blocks of steps, each in one call of a tf.function, or eager."""
    about = {"step_num": 0, "steps": count, "kind": kind, "_r": 1, **more}
    marks = [("tfgpu.steps", start, end, about) for start, end in spans]
    called = {"tf_function_call": "notTraced-nonXla", "tracing_count": 1}
    return marks if eager else [*marks, *(("wrapper", start, end, called) for start, end in spans)]
