// Makes every <svg class="disk" data-tree="..."> alive: pointing at a node lights up the way to it, a click brings it to the
// centre, a double click puts everything back. arc() and place() say what disk.py says in Python.
document.querySelectorAll("svg.disk").forEach(svg => {
  const all = kind => [...svg.querySelectorAll(kind)];
  const edges = all("path.edge"), nodes = all("circle.node"), names = all("text");
  const data = svg.dataset.tree ? JSON.parse(svg.dataset.tree) : null;
  if (!data) return;
  const {parent, leaf, depth, size: SIZE, radius: R, smallest: SMALLEST} = data, home = data.points;
  let z = home.map(p => [...p]);
  const px = x => (SIZE / 2 + R * x).toFixed(2), py = y => (SIZE / 2 - R * y).toFixed(2);

  // Light up the way from a node to its root.
  nodes.forEach(dot => {
    const way = new Set();
    for (let k = +dot.dataset.node; k >= 0; k = parent[k]) way.add(k);
    const light = on => {
      svg.classList.toggle("lit", on);
      [...edges, ...nodes, ...names].forEach(e => e.classList.toggle("on", on && way.has(+e.dataset.node)));
    };
    dot.addEventListener("pointerenter", () => light(true));
    dot.addEventListener("pointerleave", () => light(false));
    dot.addEventListener("click", event => { event.stopPropagation(); travel(z[+dot.dataset.node]); });
  });
  svg.addEventListener("dblclick", () => { z = home.map(p => [...p]); place(); });

  // The isometry of the disk that takes a to the centre: (p - a) / (1 - conj(a) p).
  const moved = (points, [ax, ay]) => points.map(([x, y]) => {
    const nx = x - ax, ny = y - ay, dx = 1 - (ax * x + ay * y), dy = -(ax * y - ay * x), q = dx * dx + dy * dy;
    return [(nx * dx + ny * dy) / q, (ny * dx - nx * dy) / q];
  });

  function arc(x1, y1, x2, y2) {
    const start = `M${px(x1)} ${py(y1)}`, end = `${px(x2)} ${py(y2)}`, det = x1 * y2 - x2 * y1;
    if (Math.abs(det) < 1e-6) return `${start}L${end}`;
    const a = (1 + x1 * x1 + y1 * y1) / 2, b = (1 + x2 * x2 + y2 * y2) / 2;
    const cx = (a * y2 - b * y1) / det, cy = (b * x1 - a * x2) / det;
    const r = (Math.sqrt(Math.max(cx * cx + cy * cy - 1, 0)) * R).toFixed(2);
    return `${start}A${r} ${r} 0 0 ${(x2 - x1) * (cy - y1) - (y2 - y1) * (cx - x1) < 0 ? 1 : 0} ${end}`;
  }

  // Which inner nodes have children that go upwards: their names go below them.
  function namesBelow() {
    const way = z.map(() => [0, 0]);
    parent.forEach((p, k) => { if (p >= 0) { way[p][0] += z[k][0] - z[p][0]; way[p][1] += z[k][1] - z[p][1]; } });
    return way.map(([x, y], k) => depth[k] > 0 && y > 0.5 * Math.abs(x));
  }

  function place() {
    const below = namesBelow();
    edges.forEach(e => { const k = +e.dataset.node; e.setAttribute("d", arc(...z[parent[k]], ...z[k])); });
    nodes.forEach(e => {
      const [x, y] = z[+e.dataset.node];
      e.setAttribute("cx", px(x));
      e.setAttribute("cy", py(y));
    });
    names.forEach(e => {
      const k = +e.dataset.node, [x, y] = z[k], d = Math.hypot(x, y), gap = (+nodes[k].getAttribute("r") + 5) / R;
      const outward = leaf[k] && d > 0.2, left = x < 0, push = outward ? 1 + gap / d : 1;
      const turn = outward ? Math.atan2(y, x) * 180 / Math.PI + (left ? 180 : 0) : 0;
      const size = (leaf[k] ? 14 : [19, 17, 14.5][Math.min(depth[k], 2)]) * Math.min(1, (1 - d * d) / 0.05);
      e.setAttribute("transform",
        `translate(${px(x * push)} ${py(outward ? y * push : below[k] ? y - gap : y + gap)}) rotate(${(-turn).toFixed(1)})`);
      e.setAttribute("text-anchor", outward ? (left ? "end" : "start") : "middle");
      e.setAttribute("dy", outward ? "0.34em" : below[k] ? "0.73em" : "0");
      e.setAttribute("font-size", size.toFixed(1));
      e.setAttribute("display", size < SMALLEST ? "none" : "inline");
    });
  }

  let journey = 0;
  function travel([ax, ay]) {
    const from = z, d = Math.hypot(ax, ay), mine = ++journey;
    if (d < 1e-9) return;
    const still = matchMedia("(prefers-reduced-motion: reduce)").matches, begin = performance.now();
    const step = now => {
      if (mine !== journey) return;
      const t = still ? 1 : Math.min(1, (now - begin) / 700), ease = t * t * (3 - 2 * t);
      const f = Math.tanh(ease * Math.atanh(d)) / d;
      z = moved(from, [ax * f, ay * f]);
      place();
      if (t < 1) requestAnimationFrame(step);
    };
    requestAnimationFrame(step);
  }
});
