// Makes every <svg class="disk" data-tree="..."> alive: pointing at a node lights up the way to it, a click brings it to the
// centre, a double click puts everything back. place() says what disk.py says in Python; needs disk.js.
document.querySelectorAll("svg.disk").forEach(svg => {
  const all = kind => [...svg.querySelectorAll(kind)];
  const edges = all("path.edge"), nodes = all("circle.node"), names = all("text");
  const data = svg.dataset.tree ? JSON.parse(svg.dataset.tree) : null;
  if (!data) return;
  const {parent, leaf, depth, size: SIZE, radius: R, smallest: SMALLEST} = data, home = data.points;
  let z = home;
  const {px, py, arc, travel, stop} = poincareDisk(R, SIZE / 2), show = points => { z = points; place(); };

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
    dot.addEventListener("click", event => { event.stopPropagation(); travel(z, z[+dot.dataset.node], show); });
  });
  svg.addEventListener("dblclick", () => { stop(); show(home); });

  // Which inner nodes have children that go upwards: their names go below them.
  function namesBelow() {
    const way = z.map(() => [0, 0]);
    parent.forEach((p, k) => { if (p >= 0) { way[p][0] += z[k][0] - z[p][0]; way[p][1] += z[k][1] - z[p][1]; } });
    return way.map(([x, y], k) => depth[k] > 0 && y > 0.5 * Math.abs(x));
  }

  function place() {
    const below = namesBelow();
    edges.forEach(e => { const k = +e.dataset.node; e.setAttribute("d", arc(z[parent[k]], z[k])); });
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
});
