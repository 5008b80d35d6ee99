// The stage: points and range rings on a canvas, images and boxes as SVG on top. Both share one view:
// its centre and its scale in pixels per metre.
const stage = document.getElementById("stage");
const canvas = document.getElementById("points");
const drawing = document.getElementById("boxes");
const world = document.getElementById("world");
const labels = document.getElementById("labels");
const view = { x: 0, y: 0, scale: 8, width: 600, height: 600 };
const up = data.image ? 1 : -1; // the y axis of an image points down
const GAUSS = Math.sqrt(-2 * Math.log(1 - 0.9)); // sigmas of the ellipse that holds 90 %

function element(name, attributes, parent) {
  const made = document.createElementNS(drawing.namespaceURI, name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  parent.append(made);
  return made;
}

function toScreen(x, y) {
  return [view.width / 2 + (x - view.x) * view.scale, view.height / 2 + up * (y - view.y) * view.scale];
}

const planeOf = (values, i) => data.plane.map((column) => values[i * data.fields.length + column]);

// x, y, width, length, heading of box i; boxes of images are x1 y1 x2 y2
function rectangle(boxes, i) {
  const [a, b, c, d, yaw] = planeOf(boxes, i);
  return data.image ? [(a + c) / 2, (b + d) / 2, d - b, c - a, 0] : [a, b, c, d, yaw];
}

function outline([x, y, across, along, yaw]) {
  const c = Math.cos(yaw);
  const s = Math.sin(yaw);
  const corner = (a, b) => `${x + a * along * c - b * across * s},${y + a * along * s + b * across * c}`;
  const corners = [corner(0.5, 0.5), corner(0.5, -0.5), corner(-0.5, -0.5), corner(-0.5, 0.5)];
  return `M${corners.join("L")}Z` + (data.image ? "" : `M${x},${y}L${corner(0.5, 0)}`);
}

// The 90 % region of box i: half widths of x and y around the centre, or of the sides of an image's
// box. Without regions: the ellipse of the covariance of the position. null: there is none.
function drawRegion(found, i, parent) {
  const box = rectangle(found.boxes, i);
  const place = { "data-x": box[0], "data-y": box[1], class: "region" };
  if (!found.region) {
    const axes = ellipseOf(found, i);
    if (!axes) return null;
    const shape = { rx: GAUSS * axes.rx, ry: GAUSS * axes.ry, "data-turn": axes.angle, "data-size": GAUSS * axes.rx };
    return element("ellipse", { ...place, ...shape }, parent);
  }
  const widths = planeOf(found.region, i);
  if (!widths.slice(0, data.image ? 4 : 2).every(Number.isFinite)) return null;
  if (data.image) {
    const [a, b, c, d] = planeOf(found.boxes, i);
    const [p, q, r, s] = widths;
    const upright = (left, top, right, bottom) => `M${left},${top}H${right}V${bottom}H${left}Z`;
    const inner = a + p < c - r && b + q < d - s ? upright(a + p, b + q, c - r, d - s) : "";
    return element("path", { class: "region band", d: upright(a - p, b - q, c + r, d + s) + inner }, parent);
  }
  const [x, y] = widths;
  const shape = { x: -x, y: -y, width: 2 * x, height: 2 * y, "data-size": Math.max(x, y) };
  return element("rect", { ...place, ...shape }, parent);
}

// Half axes and direction in degrees of the one-sigma ellipse of the position.
function ellipseOf(found, i) {
  if (!found.std) return null;
  const [xx, yy, xy] = positionCovariance(found, i);
  const mean = (xx + yy) / 2;
  const spread = Math.hypot((xx - yy) / 2, xy);
  if (!Number.isFinite(mean + spread)) return null;
  const angle = (Math.atan2(2 * xy, xx - yy) * 90) / Math.PI;
  return { rx: Math.sqrt(Math.max(mean + spread, 0)), ry: Math.sqrt(Math.max(mean - spread, 0)), angle };
}

function positionCovariance(found, i) {
  const at = (a, b) => covariance(found, i, data.plane[a], data.plane[b]);
  if (!data.image) return [at(0, 0), at(1, 1), at(0, 1)];
  // the centre is the mean of two corners
  const mean = (a, b, c, d) => (at(a, c) + at(a, d) + at(b, c) + at(b, d)) / 4;
  return [mean(0, 2, 0, 2), mean(1, 3, 1, 3), mean(0, 2, 1, 3)];
}

function covariance(found, i, a, b) {
  const D = data.fields.length;
  return found.std[i * D + a] * found.std[i * D + b] * correlation(found, i, a, b);
}

function correlation(found, i, a, b) {
  const D = data.fields.length;
  const [row, column] = [Math.max(a, b), Math.min(a, b)];
  return row === column ? 1 : found.correlations[(i * D * (D - 1)) / 2 + (row * (row - 1)) / 2 + column] / 32767;
}

function drawPoints(scene) {
  const ratio = 2; // sharp in print as well
  canvas.width = view.width * ratio;
  canvas.height = view.height * ratio;
  const context = canvas.getContext("2d");
  context.scale(ratio, ratio);
  const style = getComputedStyle(document.documentElement);
  if (data.image) return;
  drawRings(context, style);
  if (!document.getElementById("show-points").checked) return;
  const points = array(scene.points, Int16Array);
  context.fillStyle = style.getPropertyValue("--points");
  const size = Math.min(Math.max(view.scale / 8, 0.9), 2.2);
  for (let i = 0; i < points.length; i += 2) {
    const [x, y] = toScreen(points[i] / 100, points[i + 1] / 100);
    if (x > 0 && y > 0 && x < view.width && y < view.height) context.fillRect(x - size / 2, y - size / 2, size, size);
  }
}

function drawRings(context, style) {
  const step = [1, 2, 5, 10, 20, 50, 100].find((metres) => metres * view.scale > 70) || 200;
  const [x, y] = toScreen(0, 0);
  const far = Math.hypot(Math.abs(x - view.width / 2) + view.width, Math.abs(y - view.height / 2) + view.height);
  context.strokeStyle = style.getPropertyValue("--line");
  context.fillStyle = style.getPropertyValue("--faint");
  context.font = "10px system-ui, sans-serif";
  for (let r = step; r * view.scale < far; r += step) {
    context.beginPath();
    context.arc(x, y, r * view.scale, 0, 2 * Math.PI);
    context.stroke();
    context.fillText(`${r} m`, x + r * view.scale * Math.SQRT1_2 + 3, y - r * view.scale * Math.SQRT1_2 - 3);
  }
  context.beginPath();
  for (const [dx, dy] of [[0, 1], [1, 0]]) {
    context.moveTo(x - 6 * dx, y - 6 * dy);
    context.lineTo(x + 6 * dx, y + 6 * dy);
  }
  context.strokeStyle = style.getPropertyValue("--faint");
  context.stroke();
}

// Moves the drawing to the current view.
function place() {
  drawing.setAttribute("viewBox", `0 0 ${view.width} ${view.height}`);
  const [x, y] = toScreen(0, 0);
  world.setAttribute("transform", `matrix(${view.scale} 0 0 ${up * view.scale} ${x} ${y})`);
  for (const label of labels.children) {
    const [left, top] = toScreen(Number(label.dataset.x), Number(label.dataset.y));
    label.setAttribute("x", left + 5);
    label.setAttribute("y", top - 5);
  }
  magnifyRegions();
  declutter();
}

// Regions of decimetres are invisible from far: they are drawn larger, by a factor that is shown.
// The bands of an image keep their size.
function magnifyRegions() {
  const regions = [...world.querySelectorAll(".region:not(.band)")];
  const sizes = regions.map((region) => Number(region.dataset.size)).sort((a, b) => a - b);
  const median = view.scale * (sizes[sizes.length >> 1] || 1);
  const factor = sizes.length ? [1, 2, 5, 10, 20].find((times) => times * median >= 9) || 20 : 1;
  for (const region of regions) {
    const { x, y, turn } = region.dataset;
    region.setAttribute("transform", `translate(${x} ${y}) scale(${factor}) rotate(${turn ?? 0})`);
  }
  document.getElementById("magnified").textContent = factor > 1 ? `, drawn ${factor} × larger` : "";
}

// Of overlapping numbers only the largest value is shown; zooming in shows the others.
function declutter() {
  const kept = [];
  const visible = [...labels.children].filter((label) => !label.classList.contains("hidden"));
  for (const label of visible.sort((a, b) => b.dataset.value - a.dataset.value)) {
    const [x, y] = [Number(label.getAttribute("x")), Number(label.getAttribute("y"))];
    const right = x + 7 * label.textContent.length;
    const free = kept.every((other) => right < other.x || x > other.right || Math.abs(y - other.y) > 11);
    label.classList.toggle("crowded", !free);
    if (free) kept.push({ x, y, right });
  }
}

// The view that shows all rectangles.
function fit(rectangles) {
  const xs = rectangles.map((r) => r[0]).filter(Number.isFinite);
  const ys = rectangles.map((r) => r[1]).filter(Number.isFinite);
  if (!data.image) {
    xs.push(0);
    ys.push(0);
  }
  const [left, right, low, high] = [Math.min(...xs), Math.max(...xs), Math.min(...ys), Math.max(...ys)];
  const margin = data.image ? 40 : 6;
  const room = xs.length ? [right - left + 2 * margin, high - low + 2 * margin] : [60, 60];
  return {
    x: xs.length ? (left + right) / 2 : 0,
    y: ys.length ? (low + high) / 2 : 0,
    scale: Math.min(view.width / room[0], view.height / room[1]),
  };
}

// The view in which a box takes a third of the stage.
function closeUp([x, y, across, along]) {
  return { x, y, scale: Math.min(view.width, view.height) / (3 * Math.max(across, along, data.image ? 20 : 1)) };
}

function zoom(factor, x, y) {
  const scale = Math.min(Math.max(view.scale * factor, 0.05), 2000);
  const change = 1 / view.scale - 1 / scale;
  view.x += (x - view.width / 2) * change;
  view.y += up * (y - view.height / 2) * change;
  view.scale = scale;
}

// Moves the view in a quarter of a second, or at once if motion is unwanted.
function fly(to, redraw) {
  const from = { x: view.x, y: view.y, scale: view.scale };
  const still = matchMedia("(prefers-reduced-motion: reduce)").matches;
  const began = performance.now();
  fly.current = began; // a later flight ends this one
  const move = (now) => {
    if (fly.current !== began) return;
    const t = still ? 1 : Math.min(Math.max((now - began) / 250, 0), 1);
    const share = t * t * (3 - 2 * t);
    view.scale = from.scale * (to.scale / from.scale) ** share;
    // the centre moves with the visible width, so that the goal stays in sight
    const moved = to.scale === from.scale ? share : (1 / from.scale - 1 / view.scale) / (1 / from.scale - 1 / to.scale);
    view.x = from.x + (to.x - from.x) * moved;
    view.y = from.y + (to.y - from.y) * moved;
    redraw();
    if (t < 1) requestAnimationFrame(move);
  };
  if (still) move(began);
  else requestAnimationFrame(move);
}
