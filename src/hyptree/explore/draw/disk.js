// What every disk that moves needs: places in pixels, geodesics as arcs of circles, and the way of a point to the centre.
// arc() says what disk.py says in Python.
const poincareDisk = (R, middle = 0) => {
  const px = x => (middle + R * x).toFixed(2), py = y => (middle - R * y).toFixed(2);
  const arc = ([x1, y1], [x2, y2]) => {
    const start = `M${px(x1)} ${py(y1)}`, end = `${px(x2)} ${py(y2)}`, det = x1 * y2 - x2 * y1;
    if (Math.abs(det) < 1e-6) return `${start}L${end}`;
    const a = (1 + x1 * x1 + y1 * y1) / 2, b = (1 + x2 * x2 + y2 * y2) / 2;
    const cx = (a * y2 - b * y1) / det, cy = (b * x1 - a * x2) / det;
    const r = (Math.sqrt(Math.max(cx * cx + cy * cy - 1, 0)) * R).toFixed(2);
    return `${start}A${r} ${r} 0 0 ${(x2 - x1) * (cy - y1) - (y2 - y1) * (cx - x1) < 0 ? 1 : 0} ${end}`;
  };
  // The isometry of the disk that takes a to the centre: (p - a) / (1 - conj(a) p).
  const moved = (points, [ax, ay]) => points.map(([x, y]) => {
    const nx = x - ax, ny = y - ay, dx = 1 - (ax * x + ay * y), dy = -(ax * y - ay * x), q = dx * dx + dy * dy;
    return [(nx * dx + ny * dy) / q, (ny * dx - nx * dy) / q];
  });
  let journey = 0;
  const stop = () => { journey++; };
  // Brings a point to the centre step by step; `show` is given all points at each.
  const travel = (from, [ax, ay], show) => {
    const d = Math.hypot(ax, ay), mine = ++journey, begin = performance.now();
    const still = matchMedia("(prefers-reduced-motion: reduce)").matches;
    if (d < 1e-9) return;
    const step = now => {
      if (mine !== journey) return;
      const t = still ? 1 : Math.min(1, (now - begin) / 700), ease = t * t * (3 - 2 * t);
      const f = Math.tanh(ease * Math.atanh(d)) / d;
      show(moved(from, [ax * f, ay * f]));
      if (t < 1) requestAnimationFrame(step);
    };
    requestAnimationFrame(step);
  };
  return {px, py, arc, travel, stop};
};
