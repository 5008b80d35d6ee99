// The controls and their effects.
const control = (id) => document.getElementById(id);
const state = { scene: 0, method: 0, error: "IoU", pinned: null };
let found = null; // boxes of the current method and scene
let groups = []; // their SVG groups, in the same order

const scene = () => data.scenes[state.scene];
const method = () => methods[state.method];

function drawBoxes() {
  found = boxesOf(method(), scene());
  world.replaceChildren();
  labels.replaceChildren();
  const truth = array(scene().truth, Float32Array);
  const truthLabels = array(scene().truthLabels, Int16Array);
  truthLabels.forEach((label, i) => {
    const path = element("path", { class: "truth", d: outline(rectangle(truth, i)) }, world);
    element("title", {}, path).textContent = `ground truth: ${data.classes[label] ?? label}`;
  });
  groups = found.rows.map((_, i) => drawBox(i));
}

function drawBox(i) {
  const box = rectangle(found.boxes, i);
  const name = data.classes[found.labels[i]] ?? `class ${found.labels[i]}`;
  const u = digits(method().u[found.rows[i]], 2);
  const group = element("g", { class: "box", tabindex: 0, role: "img", "aria-label": `${name}, uncertainty ${u}`, "data-row": found.rows[i] }, world);
  const axes = ellipseOf(found, i);
  for (const sigmas of axes ? [1, 3] : []) {
    const place = `translate(${box[0]} ${box[1]}) rotate(${axes.angle})`;
    element("ellipse", { class: `sigma sigma${sigmas}`, rx: sigmas * axes.rx, ry: sigmas * axes.ry, transform: place }, group);
  }
  element("path", { class: "outline", d: outline(box) }, group);
  const label = element("text", { "data-x": box[0], "data-y": box[1], "data-u": method().u[found.rows[i]] }, labels);
  label.textContent = u;
  group.addEventListener("pointerenter", () => state.pinned === null && look(i));
  group.addEventListener("focus", () => look(i));
  group.addEventListener("click", () => pin(i));
  return group;
}

function look(i) {
  groups.forEach((group, k) => group.classList.toggle("looked-at", k === i));
  showBox(method(), found, i, kindOf(method(), found.rows[i], method().threshold, state.error));
}

function pin(i) {
  state.pinned = state.pinned === i ? null : i;
  groups.forEach((group, k) => group.classList.toggle("pinned", k === state.pinned));
  details.classList.toggle("pinned", state.pinned !== null);
  look(i);
}

// Updates everything that depends on the threshold and the error.
function judge() {
  const { threshold } = method();
  groups.forEach((group, i) => {
    const kind = kindOf(method(), found.rows[i], threshold, state.error);
    const uncertain = !(method().u[found.rows[i]] < threshold);
    group.classList.toggle("uncertain", uncertain);
    group.classList.toggle("inaccurate", kind !== null && kind[0] === "I");
    labels.children[i].classList.toggle("uncertain", uncertain);
  });
  tell("all", count(method(), threshold, state.error, null));
  if (data.scenes.length) tell("shown", count(method(), threshold, state.error, scene().frame));
  const below = shareBelow(method().sorted, threshold);
  control("share").textContent = `${Math.round(100 * below)} % of boxes below`;
}

function tell(where, counts) {
  const { AC, IC, AU, IU } = counts;
  for (const [kind, value] of Object.entries(counts)) control(`${where}-${kind}`).textContent = value;
  const ratio = (part, whole) => (whole ? (part / whole).toFixed(3) : "–");
  control(`${where}-AvU`).textContent = ratio(AC + IU, AC + IC + AU + IU);
  control(`${where}-PAC`).textContent = ratio(AC, AC + IC);
  control(`${where}-PUI`).textContent = ratio(IU, IC + IU);
}

function setThreshold(value, from) {
  method().threshold = value;
  if (from !== "slider") control("slider").value = 1000 * shareBelow(method().sorted, value);
  if (from !== "field") control("threshold").value = Number.isFinite(value) ? Number(value.toPrecision(6)) : "";
  control("threshold").title = `${value}`;
  judge();
  if (state.pinned !== null) look(state.pinned);
}

function showScene(refit) {
  state.pinned = null;
  control("method-note").textContent = method().note;
  if (data.scenes.length) {
    control("scene").value = state.scene;
    control("previous").disabled = state.scene === 0;
    control("next").disabled = state.scene === data.scenes.length - 1;
    control("points-note").textContent = pointsNote();
    details.classList.remove("pinned");
    details.replaceChildren(node("p", "Point at a box, or reach it with Tab, to see its covariance. Click to pin it.", "quiet"));
    drawBoxes();
    if (refit) fitScene();
    redraw();
  }
  setThreshold(method().threshold, null);
}

function pointsNote() {
  const kept = array(scene().points, Int16Array).length / 2;
  const total = scene().pointsTotal;
  return kept < total ? `${kept.toLocaleString("en")} of ${total.toLocaleString("en")} points drawn.` : `${total.toLocaleString("en")} points.`;
}

function fitScene() {
  const truth = array(scene().truth, Float32Array);
  const objects = Array.from({ length: array(scene().truthLabels, Int16Array).length }, (_, i) => rectangle(truth, i));
  fit([...objects, ...groups.map((_, i) => rectangle(found.boxes, i))]);
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

function lookFrom(factor) {
  zoom(factor, view.width / 2, view.height / 2);
  redraw();
}
