"use strict";
// The part of a drawing that is seen: pan by dragging or arrow keys, zoom by the wheel, + and -, all by a double
// click or 0.

const MARGIN = 30;
const ZOOM = 1.15;
const STEP = 0.1;

/** The part of a drawing that is seen, in the units of the drawing. */
class Camera {
  constructor(canvas, view) {
    this.canvas = canvas;
    this.whole = {
      x: -MARGIN,
      y: -MARGIN,
      w: Math.max(view.width, 300) + 2 * MARGIN,
      h: Math.max(view.height, 200) + 2 * MARGIN,
    };
    this.seen = { ...this.whole, h: Math.min(this.whole.h, this.whole.w * 1.5) };
    this.drag = null;
    canvas.setAttribute("tabindex", 0);
    canvas.addEventListener("wheel", (event) => this.turned(event), { passive: false });
    canvas.addEventListener("pointerdown", (event) => (this.drag = { x: event.clientX, y: event.clientY }));
    canvas.addEventListener("pointermove", (event) => this.moved(event));
    canvas.addEventListener("pointerup", () => (this.drag = null));
    canvas.addEventListener("dblclick", () => this.fit());
    canvas.addEventListener("keydown", (event) => this.pressed(event));
    this.show();
  }

  show() {
    const { x, y, w, h } = this.seen;
    this.canvas.setAttribute("viewBox", `${x} ${y} ${w} ${h}`);
  }

  /** Shows all of the drawing. */
  fit() {
    this.seen = { ...this.whole };
    this.show();
  }

  /** Zooms about a point, which is given as shares of what is seen. */
  zoom(factor, acrossShare = 0.5, downShare = 0.5) {
    const { seen } = this;
    const grown = Math.min(Math.max(seen.w * factor, 120), this.whole.w * 4) / seen.w;
    seen.x += seen.w * acrossShare * (1 - grown);
    seen.y += seen.h * downShare * (1 - grown);
    seen.w *= grown;
    seen.h *= grown;
    this.show();
  }

  /** Moves by a distance in units of the drawing. */
  pan(across, down) {
    this.seen.x += across;
    this.seen.y += down;
    this.show();
  }

  turned(event) {
    event.preventDefault();
    const area = this.canvas.getBoundingClientRect();
    const [across, down] = [event.clientX - area.left, event.clientY - area.top];
    this.zoom(event.deltaY > 0 ? ZOOM : 1 / ZOOM, across / area.width, down / area.height);
  }

  moved(event) {
    if (this.drag === null || event.buttons === 0) return;
    const [across, down] = [event.clientX - this.drag.x, event.clientY - this.drag.y];
    if (!this.drag.moved && Math.hypot(across, down) < 4) return; // a click, with an unsteady hand
    if (!this.drag.moved) this.canvas.setPointerCapture(event.pointerId);
    this.drag = { x: event.clientX, y: event.clientY, moved: true };
    const { w, h } = this.seen;
    const scale = Math.max(w / this.canvas.clientWidth, h / this.canvas.clientHeight) || 1;
    this.pan(-across * scale, -down * scale);
  }

  pressed(event) {
    const { w, h } = this.seen;
    const moves = { ArrowLeft: [-w, 0], ArrowRight: [w, 0], ArrowUp: [0, -h], ArrowDown: [0, h] };
    if (moves[event.key]) this.pan(...moves[event.key].map((size) => size * STEP));
    else if (event.key === "+" || event.key === "-") this.zoom(event.key === "-" ? ZOOM : 1 / ZOOM);
    else if (event.key === "0") this.fit();
    else return;
    event.preventDefault();
  }
}
