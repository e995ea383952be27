// The explorer of a page: one picture, one layer, one head; the clusters on the picture, their tree, and the disk.
// Pointing at a cluster in one of the three lights it up in all of them. The address keeps the state (#image=1&layer=3).
(() => {
  const box = document.getElementById("explorer");
  if (!box) return;
  const data = JSON.parse(document.getElementById("explorer-data").textContent);
  const $ = name => box.querySelector(`[data-part="${name}"]`);
  const NS = ["http:", "", "www.w3.org", "2000", "svg"].join("/");
  const make = (kind, attributes, parent) => {
    const e = document.createElementNS(NS, kind);
    for (const k in attributes) e.setAttribute(k, attributes[k]);
    if (parent) parent.append(e);
    return e;
  };
  const canvas = $("picture"), context = canvas.getContext("2d"), disk = $("disk"), wood = $("tree"), said = $("said");
  const state = {image: 0, layer: data.start[0], head: data.start[1], detail: 9, overlay: 55, node: -1};
  let pinned = false, view = null;

  // ---- data ------------------------------------------------------------------------------------------------------
  const bytes = text => Uint8Array.from(atob(text), c => c.charCodeAt(0));
  const short = text => new Uint16Array(bytes(text).buffer);
  const signed = text => new Int16Array(bytes(text).buffer);
  const pictures = data.images.map(one => {
    const picture = new Image();
    picture.src = one.src;
    return picture;
  });

  // What is drawn for one picture, layer and head: the tree with colours and places.
  function read(one) {
    const parent = [...short(one.parent)].map((p, k) => k ? p : -1), n = parent.length;
    const leafOf = short(one.leaf), sure = bytes(one.sure), xy = signed(one.xy);
    const depth = new Array(n).fill(0), children = parent.map(() => []), area = new Float64Array(n);
    for (let k = 1; k < n; k++) { depth[k] = depth[parent[k]] + 1; children[parent[k]].push(k); }
    for (const leaf of leafOf) for (let k = leaf; k >= 0; k = parent[k]) area[k] += 1 / leafOf.length;
    const home = Array.from({length: n}, (_, k) => [xy[2 * k] / 32768, xy[2 * k + 1] / 32768]);
    const angle = k => Math.atan2(home[k][1], home[k][0]);
    const tops = [...children[0]].sort((a, b) => angle(a) - angle(b));
    const color = new Array(n).fill(null), hue = [];
    tops.forEach((top, rank) => { hue[top] = 25 + 360 * rank / tops.length; });
    children[0] = tops;
    const paint = (k, h, low, high) => {
      color[k] = oklch((low + high) / 2, 0.145, h);
      const kids = children[k].sort((a, b) => area[b] - area[a]);
      kids.forEach((kid, i) => {
        const t = kids.length < 2 ? 0.5 : i / (kids.length - 1), mid = low + (high - low) * (0.12 + 0.76 * t);
        const half = (high - low) / 2 / kids.length;
        paint(kid, h + (t - 0.5) * 360 / tops.length * 0.55, mid - half, mid + half);
      });
    };
    color[0] = [128, 134, 148];
    tops.forEach(top => paint(top, hue[top], 0.5, 0.88));
    return {...one, parent, leafOf, sure, home, z: home, depth, children, area, color, n,
      deepest: Math.max(...depth)};
  }

  function oklch(L, C, h) {
    const a = C * Math.cos(h * Math.PI / 180), b = C * Math.sin(h * Math.PI / 180);
    const l = (L + 0.3963377774 * a + 0.2158037573 * b) ** 3, m = (L - 0.1055613458 * a - 0.0638541728 * b) ** 3;
    const s = (L - 0.0894841775 * a - 1.291485548 * b) ** 3;
    return [4.0767416621 * l - 3.3077115913 * m + 0.2309699292 * s,
      -1.2684380046 * l + 2.6097574011 * m - 0.3413193965 * s,
      -0.0041960863 * l - 0.7034186147 * m + 1.707614701 * s].map(v => {
      const x = Math.min(1, Math.max(0, v));
      return Math.round(255 * (x <= 0.0031308 ? 12.92 * x : 1.055 * x ** (1 / 2.4) - 0.055));
    });
  }
  const css = ([r, g, b]) => `rgb(${r} ${g} ${b})`;

  const shownDepth = () => Math.min(Math.max(state.detail, 1), view.deepest);
  // The node a leaf stands for at the chosen detail.
  const atDetail = leaf => {
    let k = leaf;
    while (view.depth[k] > shownDepth()) k = view.parent[k];
    return k;
  };
  const within = (k, top) => {
    for (; k >= 0; k = view.parent[k]) if (k === top) return true;
    return false;
  };

  // ---- the picture -------------------------------------------------------------------------------------------------
  function drawPicture() {
    const picture = pictures[state.image], side = Math.max(320, Math.round(canvas.clientWidth * devicePixelRatio));
    const {h, w, leafOf, sure, color} = view, ratio = picture.naturalHeight / picture.naturalWidth || h / w;
    if (canvas.width !== side || canvas.height !== Math.round(side * ratio)) {
      canvas.width = side;
      canvas.height = Math.round(side * ratio);
    }
    const W = canvas.width, H = canvas.height;
    context.imageSmoothingEnabled = true;
    context.imageSmoothingQuality = "high";
    context.drawImage(picture, 0, 0, W, H);
    const node = [...leafOf].map(atDetail), lit = state.node >= 0 ? node.map((_, i) => within(leafOf[i], state.node)) : null;
    const tint = new OffscreenCanvas(w, h), brush = tint.getContext("2d"), pixels = brush.createImageData(w, h);
    node.forEach((k, i) => {
      const on = !lit || lit[i], [r, g, b] = on ? color[k] : [12, 14, 20];
      const alpha = lit ? (on ? 0 : 0.68) : state.overlay / 100 * (0.45 + 0.55 * sure[i] / 255);
      pixels.data.set([r, g, b, Math.round(255 * alpha)], 4 * i);
    });
    brush.putImageData(pixels, 0, 0);
    context.imageSmoothingEnabled = false;
    context.drawImage(tint, 0, 0, W, H);
    // Lines between clusters: dark below, light above, so that they are seen on every ground.
    const lines = new Path2D(), rim = new Path2D(), sx = W / w, sy = H / h;
    for (let y = 0; y < h; y++) for (let x = 0; x < w; x++) {
      const i = y * w + x;
      for (const [j, x1, y1, x2, y2] of [[i + 1, x + 1, y, x + 1, y + 1], [i + w, x, y + 1, x + 1, y + 1]]) {
        if (j === i + 1 ? x + 1 >= w : y + 1 >= h) continue;
        if (node[i] !== node[j]) { lines.moveTo(x1 * sx, y1 * sy); lines.lineTo(x2 * sx, y2 * sy); }
        if (lit && lit[i] !== lit[j]) { rim.moveTo(x1 * sx, y1 * sy); rim.lineTo(x2 * sx, y2 * sy); }
      }
    }
    context.lineCap = "round";
    if (state.overlay > 0 && !lit) {
      context.lineWidth = W / 320 * Math.min(1, 20 / w); context.strokeStyle = "rgb(255 255 255 / .55)"; context.stroke(lines);
    }
    if (lit) {
      context.lineWidth = W / 110; context.strokeStyle = "rgb(0 0 0 / .6)"; context.stroke(rim);
      context.lineWidth = W / 220; context.strokeStyle = "#fff"; context.stroke(rim);
    }
  }

  const leafAt = event => {
    const r = canvas.getBoundingClientRect();
    const x = Math.floor((event.clientX - r.left) / r.width * view.w), y = Math.floor((event.clientY - r.top) / r.height * view.h);
    return x < 0 || y < 0 || x >= view.w || y >= view.h ? -1 : view.leafOf[y * view.w + x];
  };
  const point = event => { const leaf = leafAt(event); if (!pinned) light(leaf < 0 ? -1 : atDetail(leaf)); };
  canvas.addEventListener("pointermove", point);
  canvas.addEventListener("pointerleave", () => { if (!pinned) light(-1); });
  canvas.addEventListener("click", event => { const leaf = leafAt(event); if (leaf >= 0) pin(atDetail(leaf)); });

  // ---- the tree ----------------------------------------------------------------------------------------------------
  const thumbnails = new Map();
  function thumbnail(node) {
    const key = [state.image, state.layer, state.head, node].join();
    if (!thumbnails.has(key)) {
      const side = 96, small = document.createElement("canvas"), brush = small.getContext("2d"), {h, w, leafOf} = view;
      small.width = small.height = side;
      brush.drawImage(pictures[state.image], 0, 0, side, side);
      brush.fillStyle = "rgb(20 22 30 / .8)";
      leafOf.forEach((leaf, i) => {
        if (!within(leaf, node)) {
          const x = i % w, y = Math.floor(i / w), x0 = Math.round(x * side / w), y0 = Math.round(y * side / h);
          brush.fillRect(x0, y0, Math.round((x + 1) * side / w) - x0, Math.round((y + 1) * side / h) - y0);
        }
      });
      thumbnails.set(key, small.toDataURL());
    }
    return thumbnails.get(key);
  }

  function drawTree() {
    wood.replaceChildren();
    const {n, children, depth, area, color, deepest} = view, W = 1080, gap = 10;
    const order = [], spot = new Array(n), width = new Array(n).fill(0);
    const weight = k => children[k].length ? children[k].reduce((sum, kid) => sum + weight(kid), 0) : 0.35 + Math.sqrt(area[k]);
    const unit = (W - gap * Math.max(0, children[0].length - 1)) / weight(0);
    let x = 0;
    const lay = k => {
      order.push(k);
      const start = x;
      if (!children[k].length) x += unit * weight(k);
      children[k].forEach((kid, i) => { if (k === 0 && i) x += gap; lay(kid); });
      width[k] = x - start;
      spot[k] = start + width[k] / 2;
    };
    lay(0);
    const levels = Array.from({length: deepest + 1}, () => []);
    for (const k of order) levels[depth[k]].push(k);
    const size = levels.map((level, d) => {
      if (!d) return 84;
      const room = Math.min(...level.map(k => width[k])), mean = W / level.length;
      return Math.max(12, Math.min(d === 1 ? 76 : 44, d < deepest ? mean - 8 : (room + mean) / 2 - 3));
    });
    const y = [];
    let top = 0;
    size.forEach((s, d) => { y[d] = top; top += s + (d < deepest ? 52 : 0); });
    const H = top + 6;
    wood.setAttribute("viewBox", `-4 -4 ${W + 8} ${H + 4}`);
    const links = make("g", {fill: "none"}, wood), nodes = make("g", {}, wood);
    for (const k of order) {
      const d = depth[k], s = size[d], mine = d ? Math.min(s, Math.max(2, width[k] - 2)) : s;
      if (k) {
        const p = view.parent[k], x1 = spot[p], y1 = y[d - 1] + size[d - 1], x2 = spot[k], y2 = y[d];
        make("path", {class: "link", "data-node": k, stroke: css(color[k]), "stroke-width": (1 + 5 * Math.sqrt(area[k])).toFixed(1),
          d: `M${x1.toFixed(1)} ${y1}C${x1.toFixed(1)} ${y1 + 30} ${x2.toFixed(1)} ${y2 - 30} ${x2.toFixed(1)} ${y2}`}, links);
      }
      const g = make("g", {class: "tnode", "data-node": k, role: "treeitem", "aria-level": d + 1, "aria-label": describe(k)}, nodes);
      const left = spot[k] - mine / 2;
      if (mine >= 20) {
        make("image", {href: thumbnail(k), x: left.toFixed(1), y: y[d], width: mine.toFixed(1), height: mine.toFixed(1),
          preserveAspectRatio: "none"}, g);
        make("rect", {class: "frame", x: left.toFixed(1), y: y[d], width: mine.toFixed(1), height: mine.toFixed(1), rx: 3,
          stroke: css(color[k])}, g);
      } else {
        make("rect", {class: "chip", x: left.toFixed(1), y: y[d], width: mine.toFixed(1), height: (children[k].length ? mine : s).toFixed(1), rx: Math.min(3, mine / 3),
          fill: css(color[k])}, g);
      }
    }
  }

  // ---- the disk ----------------------------------------------------------------------------------------------------
  const R = 470, {px, py, arc, travel, stop} = poincareDisk(R);
  let edges = [], dots = [];
  function drawDisk() {
    disk.replaceChildren();
    make("circle", {class: "rim", r: R}, disk);
    for (const share of [0.25, 0.5, 0.75]) make("circle", {class: "ring", r: (R * share).toFixed(1)}, disk);
    const lines = make("g", {fill: "none", "stroke-linecap": "round"}, disk), points = make("g", {}, disk);
    edges = []; dots = [];
    for (let k = 0; k < view.n; k++) {
      if (k) {
        edges.push(make("path", {class: "dedge", "data-node": k, stroke: css(view.color[k]),
          "stroke-width": (1 + 4 * Math.sqrt(view.area[k])).toFixed(1)}, lines));
      }
      dots.push(make("circle", {class: "dnode", "data-node": k, fill: css(view.color[k])}, points));
    }
    place();
  }
  function place() {
    const {z, parent, depth, area} = view;
    edges.forEach((e, i) => e.setAttribute("d", arc(z[parent[i + 1]], z[i + 1])));
    dots.forEach((e, k) => {
      const [x, y] = z[k], near = Math.sqrt(Math.max(0.12, 1 - x * x - y * y));
      e.setAttribute("cx", px(x));
      e.setAttribute("cy", py(y));
      e.setAttribute("r", ((depth[k] === 0 ? 11 : depth[k] < view.deepest || view.deepest === 1 ? 9 + 22 * Math.sqrt(area[k]) : 4 + 20 * Math.sqrt(area[k])) * near).toFixed(1));
    });
  }
  disk.addEventListener("dblclick", () => { stop(); view.z = view.home; place(); });

  // ---- pointing, pinning, saying -----------------------------------------------------------------------------------
  const percent = share => share < 0.01 ? "<1 %" : `${Math.round(100 * share)} %`;
  function describe(k) {
    const name = k === 0 ? "The whole picture" : `${view.names[view.depth[k] - 1]} ${view.number[k]}`;
    const parts = [name];
    if (k) parts.push(`${percent(view.area[k])} of the picture`);
    if (view.children[k].length) parts.push(`${view.children[k].length} below it`);
    const seen = view.mostly && view.mostly[k];
    if (k && seen && seen[0] >= 0) parts.push(`mostly ${data.regions[seen[0]]} (${seen[1]} %)`);
    return parts.join(" · ");
  }
  function light(node) {
    if (node === state.node) return;
    state.node = node;
    const on = new Set();
    for (let k = node; k >= 0; k = view.parent[k]) on.add(k);
    for (let k = 0; node >= 0 && k < view.n; k++) if (within(k, node)) on.add(k);
    for (const picture of [wood, disk]) {
      picture.classList.toggle("lit", node >= 0);
      picture.querySelectorAll("[data-node]").forEach(e => {
        e.classList.toggle("on", on.has(+e.dataset.node));
        e.classList.toggle("self", +e.dataset.node === node);
      });
    }
    drawPicture();
    said.textContent = node >= 0 ? describe(node) : view.hint;
    said.style.setProperty("--dot", node >= 0 ? css(view.color[node]) : "transparent");
  }
  function pin(node) {
    pinned = !(pinned && node === state.node);
    light(pinned ? node : -1);
    box.classList.toggle("pinned", pinned);
    remember();
  }
  for (const picture of [wood, disk]) {
    const nodeOf = event => event.target.closest("[data-node]");
    picture.addEventListener("pointerover", event => { const e = nodeOf(event); if (!pinned) light(e ? +e.dataset.node : -1); });
    picture.addEventListener("pointerleave", () => { if (!pinned) light(-1); });
    picture.addEventListener("click", event => {
      const e = nodeOf(event);
      if (!e) { if (pinned) pin(state.node); return; }
      if (picture === disk) {
        const here = view;
        travel(here.z, here.z[+e.dataset.node], z => { here.z = z; if (here === view) place(); });
      }
      pin(+e.dataset.node);
    });
  }
  // Arrow keys walk along the tree: up to the parent, down to the first child, sideways to the neighbours.
  const walk = event => {
    const {parent, children, depth} = view, k = state.node;
    let next = null;
    if (event.key === "Escape") next = -1;
    else if (k < 0 && event.key.startsWith("Arrow")) next = 0;
    else if (event.key === "ArrowUp") next = Math.max(0, parent[k]);
    else if (event.key === "ArrowDown") next = children[k].length ? children[k][0] : k;
    else if (event.key === "ArrowLeft" || event.key === "ArrowRight") {
      const row = [], collect = j => { if (depth[j] === depth[k]) row.push(j); else children[j].forEach(collect); };
      collect(0);
      next = row[(row.indexOf(k) + (event.key === "ArrowRight" ? 1 : row.length - 1)) % row.length];
    }
    if (next === null) return;
    event.preventDefault();
    pinned = next >= 0;
    box.classList.toggle("pinned", pinned);
    light(next);
    remember();
  };
  for (const part of [canvas, wood, disk]) part.addEventListener("keydown", walk);

  // ---- controls ----------------------------------------------------------------------------------------------------
  const inputs = {layer: $("layer"), head: $("head"), detail: $("detail"), overlay: $("overlay")};
  const say = (name, text) => { $(`${name}-said`).textContent = text; inputs[name].setAttribute("aria-valuetext", text); };
  const buttons = [...box.querySelectorAll("[data-image]")];
  buttons.forEach(button => button.addEventListener("click", () => { state.image = +button.dataset.image; show(); }));
  for (const name in inputs) inputs[name].addEventListener("input", () => { state[name] = +inputs[name].value; show(); });

  function show() {
    const clamp = (value, most) => Math.min(Math.max(value, 0), most);
    state.image = clamp(state.image, data.images.length - 1);
    state.layer = clamp(state.layer, data.layers.length - 1);
    const layer = data.layers[state.layer];
    const head = clamp(state.head, layer.heads - 1);
    const one = data.images[state.image];
    view = {...read(one.layers[state.layer][head]), names: layer.names};
    view.number = [];
    const seen = {};
    view.parent.forEach((_, k) => { seen[view.depth[k]] = (seen[view.depth[k]] || 0) + 1; view.number[k] = seen[view.depth[k]]; });
    view.hint = "Point at a cluster, in the picture, the tree or the disk. Click to hold it; arrow keys walk along the tree.";
    inputs.layer.max = data.layers.length - 1; inputs.layer.value = state.layer;
    inputs.head.max = layer.heads - 1; inputs.head.value = head; inputs.head.disabled = layer.heads < 2;
    inputs.detail.max = view.deepest; inputs.detail.min = 1; inputs.detail.value = shownDepth();
    inputs.detail.disabled = view.deepest < 2;
    inputs.overlay.value = state.overlay;
    say("layer", layer.title);
    say("head", layer.heads < 2 ? "one for all" : `${head + 1} of ${layer.heads}`);
    say("detail", `${view.names[shownDepth() - 1]}s`.replace(/ss$/, "s"));
    say("overlay", `${state.overlay} %`);
    $("layer-about").textContent = layer.about;
    $("disk-about").textContent = layer.disk + (view.zoom > 1.05 ? ` Distances are drawn ${view.zoom} times as long.` : "");
    buttons.forEach((button, k) => button.setAttribute("aria-pressed", k === state.image));
    canvas.setAttribute("aria-label", `${one.alt}. ${layer.title}: ${view.children[0].length} clusters at the top of the tree.`);
    $("answer").innerHTML = one.answer;
    const node = state.node;
    state.node = -2;
    drawTree();
    drawDisk();
    pinned = pinned && node >= 0 && node < view.n;
    box.classList.toggle("pinned", pinned);
    light(pinned ? node : -1);
    remember();
  }

  // ---- the address -------------------------------------------------------------------------------------------------
  function remember() {
    const kept = {image: state.image, layer: state.layer, head: state.head, detail: state.detail, overlay: state.overlay};
    if (pinned) kept.node = state.node;
    try { history.replaceState(null, "", "#" + new URLSearchParams(kept)); } catch { /* not everywhere on file:// */ }
  }
  function recall() {
    const asked = new URLSearchParams(location.hash.slice(1));
    for (const name in state) {
      const value = parseInt(asked.get(name), 10);
      if (Number.isFinite(value)) state[name] = value;
    }
    pinned = asked.has("node");
  }
  recall();
  const start = () => { show(); new ResizeObserver(() => drawPicture()).observe(canvas); };
  Promise.allSettled(pictures.map(picture => picture.decode())).then(start);
  addEventListener("hashchange", () => { recall(); show(); });
})();
