// What is shown: a frame, a method, filters, a pinned box; and the link to it.
const control = (id) => document.getElementById(id);
const state = { scene: 0, method: 0, pinned: null, label: -1 };
const methods = data.methods;
let found = null; // boxes of the current method and scene
let groups = []; // their SVG groups, in the same order
let shown = []; // which of them pass the filters

const scene = () => data.scenes[state.scene];
const method = () => methods[state.method];

// A colour between low and high: the risk, or else the rank of the value in this frame.
function toneOf(method, found, i) {
  const share = method.value.name === "risk" ? found.value[i] : 1 - found.order.indexOf(i) / Math.max(found.order.length - 1, 1);
  const [from, to, part] = share < 0.5 ? ["low", "middle", 2 * share] : ["middle", "high", 2 * share - 1];
  return `color-mix(in oklab, var(--${to}) ${Math.round(100 * part)}%, var(--${from}))`;
}

function drawBoxes() {
  found = boxesOf(method(), scene());
  world.replaceChildren();
  labels.replaceChildren();
  const { image } = scene();
  if (image) element("image", { href: image.href, width: image.width, height: image.height }, world);
  const truth = array(scene().truth, Float32Array);
  const truthLabels = array(scene().truthLabels, Int16Array);
  truthLabels.forEach((label, i) => {
    const path = element("path", { class: "truth", d: outline(rectangle(truth, i)) }, world);
    element("title", {}, path).textContent = `object: ${className(label)}`;
  });
  groups = Array.from(found.value, (_, i) => drawBox(i));
}

function drawBox(i) {
  const box = rectangle(found.boxes, i);
  const value = valueText(method(), found.value[i]);
  const title = `${className(found.labels[i])}, ${method().value.name} ${value}`;
  // a region is where the object is, if there is one: it says little about a box that is probably bad
  const isDoubtful = method().value.name === "risk" && found.value[i] > 0.5;
  const kind = `box${found.bad[i] ? " bad" : ""}${isDoubtful ? " doubtful" : ""}`;
  const group = element("g", { class: kind, tabindex: 0, role: "img", "aria-label": title, "data-box": i }, world);
  group.style.setProperty("--tone", toneOf(method(), found, i));
  drawRegion(found, i, group);
  element("path", { class: "outline", d: outline(box) }, group);
  const label = element("text", { "data-x": box[0], "data-y": box[1], "data-value": found.value[i] }, labels);
  label.textContent = value;
  label.style.setProperty("--tone", toneOf(method(), found, i));
  group.addEventListener("pointerenter", () => state.pinned === null && look(i));
  group.addEventListener("focus", () => state.pinned === null && look(i));
  group.addEventListener("click", () => pin(state.pinned === i ? null : i));
  return group;
}

function look(i) {
  groups.forEach((group, k) => group.classList.toggle("looked-at", k === i));
  showBox(method(), found, i);
}

function lookAway() {
  groups.forEach((group) => group.classList.remove("looked-at"));
  details.replaceChildren(node("p", "Choose a box in the list or in the picture. Its fields, their errors and its 90 % region appear here.", "quiet"));
}

function pin(i) {
  state.pinned = i;
  groups.forEach((group, k) => group.classList.toggle("pinned", k === i));
  if (i !== null) raise(groups[i]);
  details.classList.toggle("pinned", i !== null);
  stage.classList.toggle("has-pinned", i !== null);
  markRow(i);
  if (i === null) lookAway();
  else look(i);
  writeLink();
}

// Draws a box on top of its neighbours; a move in the document would lose the keyboard's focus.
function raise(group) {
  const hadFocus = world.contains(document.activeElement);
  world.append(group);
  if (hadFocus) group.focus({ preventScroll: true });
}

function flyTo(i) {
  pin(i);
  fly(closeUp(rectangle(found.boxes, i)), redraw);
}

// The next or previous box of the list.
function stepBox(by) {
  const boxes = found.order.filter((i) => shown[i]);
  const at = boxes.indexOf(state.pinned);
  const next = boxes[at < 0 ? (by > 0 ? 0 : boxes.length - 1) : at + by];
  if (next !== undefined) flyTo(next);
}

// The lowest value that is shown: a risk, or a share of the frame's boxes.
function lowestValue() {
  const share = Number(control("value-filter").value) / 100;
  if (method().value.name === "risk" || share === 0) return share || -Infinity;
  return found.value[found.order[Math.floor((1 - share) * (found.order.length - 1))]];
}

function filter() {
  const score = Number(control("score-filter").value) / 100;
  const lowest = lowestValue();
  shown = groups.map((_, i) => found.scores[i] >= score && found.value[i] >= lowest && (state.label < 0 || found.labels[i] === state.label));
  groups.forEach((group, i) => {
    group.classList.toggle("hidden", !shown[i]);
    labels.children[i].classList.toggle("hidden", !shown[i]);
  });
  const isRisk = method().value.name === "risk";
  control("score-text").textContent = score.toFixed(2);
  control("value-name").textContent = isRisk ? "risk ≥" : "top";
  control("value-text").textContent = isRisk ? `${control("value-filter").value} %` : `${100 - control("value-filter").value} %`;
  const others = found.total > groups.length ? `, the highest scores of ${found.total.toLocaleString("en")}` : "";
  control("count").textContent = `${shown.filter(Boolean).length} of ${groups.length} boxes${others}`;
  listBoxes(method(), found, shown, flyTo);
  if (state.pinned !== null && !shown[state.pinned]) pin(null);
  else markRow(state.pinned);
  declutter();
}

function showScene(refit) {
  control("method").title = method().note;
  for (const place of document.querySelectorAll(".value-name")) place.textContent = method().value.name;
  control("scene").value = state.scene;
  control("previous").disabled = state.scene === 0;
  control("next").disabled = state.scene === data.scenes.length - 1;
  control("points-note").textContent = pointsNote();
  control("region-note").textContent = method().regions ? "90 % region of boxes with a risk up to 50 %" : "90 % ellipse";
  drawBoxes();
  pin(null);
  filter();
  if (refit) Object.assign(view, fitScene());
  redraw();
}

function pointsNote() {
  if (data.image) return "";
  const kept = array(scene().points, Int16Array).length / 2;
  const total = scene().pointsTotal;
  return kept < total ? `${kept.toLocaleString("en")} of ${total.toLocaleString("en")} points drawn.` : `${total.toLocaleString("en")} points.`;
}

function fitScene() {
  const { image } = scene();
  if (image) {
    const scale = Math.min(view.width / image.width, view.height / image.height);
    return { x: image.width / 2, y: image.height / 2, scale };
  }
  const truth = array(scene().truth, Float32Array);
  const objects = Array.from({ length: array(scene().truthLabels, Int16Array).length }, (_, i) => rectangle(truth, i));
  return fit([...objects, ...groups.map((_, i) => rectangle(found.boxes, i))]);
}

function redraw() {
  place();
  drawPoints(scene());
}

function step(by) {
  const next = state.scene + by;
  if (next < 0 || next >= data.scenes.length) return;
  state.scene = next;
  showScene(false);
}

function showAll() {
  pin(null);
  fly(fitScene(), redraw);
}

function lookFrom(factor) {
  zoom(factor, view.width / 2, view.height / 2);
  redraw();
}

// The address names the frame and the pinned box: #frame=3&box=12
function writeLink() {
  const box = state.pinned === null ? "" : `&box=${state.pinned}`;
  if (state.pinned !== null || location.hash.startsWith("#frame=")) {
    history.replaceState(null, "", `#frame=${scene().frame}${box}`);
  }
}

// Shows what the address names, if it names a frame.
function readLink() {
  const named = /^#frame=(\d+)(?:&box=(\d+))?$/.exec(location.hash);
  const number = named ? data.scenes.findIndex((entry) => entry.frame === Number(named[1])) : -1;
  if (number < 0) return;
  state.scene = number;
  showScene(true);
  const box = named[2] === undefined ? -1 : Number(named[2]);
  if (box < 0 || box >= groups.length) return;
  if (!shown[box]) {
    control("score-filter").value = 0;
    control("value-filter").value = 0;
    filter();
  }
  flyTo(box);
}
